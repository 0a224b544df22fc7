"""The rules of Kubernetes' "restricted" pod security standard, with those of "baseline" that it contains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.charts.helm import Manifest, containers

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
SECCOMP = {"RuntimeDefault", "Localhost"}
SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def offences(pod: Manifest) -> list[str]:
    """Return a message for every rule that a pod's specification violates."""
    return [*_of_pod(pod), *(violation for container in containers(pod) for violation in _of_container(container, pod))]


def _of_pod(pod: Manifest) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} is true"
    for volume in pod.get("volumes", []):
        if set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is of a kind that is not allowed"
    if pod.get("securityContext", {}).get("sysctls"):
        yield "sysctls are set"


def _of_container(container: Manifest, pod: Manifest) -> Iterator[str]:
    name, own, outer = container["name"], container.get("securityContext", {}), pod.get("securityContext", {})

    def effective(key: str) -> Any:
        return own[key] if key in own else outer.get(key)

    if own.get("privileged"):
        yield f"{name} is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name} may escalate privileges"
    if own.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{name} does not drop all capabilities"
    if set(own.get("capabilities", {}).get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"{name} adds capabilities"
    if effective("runAsNonRoot") is not True:
        yield f"{name} may run as root"
    if effective("runAsUser") == 0:
        yield f"{name} runs as user 0"
    if (effective("seccompProfile") or {}).get("type") not in SECCOMP:
        yield f"{name} has no seccomp profile"
    if (effective("seLinuxOptions") or {}).get("type", "") not in SELINUX:
        yield f"{name} has a SELinux type that is not allowed"
    if (effective("appArmorProfile") or {}).get("type", "RuntimeDefault") == "Unconfined":
        yield f"{name} is not confined by AppArmor"
    if (own.get("windowsOptions") or {}).get("hostProcess") or own.get("procMount", "Default") != "Default":
        yield f"{name} reaches into its host"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield f"{name} has a host port"
    handlers = [container.get(f"{probe}Probe", {}) for probe in ("startup", "readiness", "liveness")]
    handlers += container.get("lifecycle", {}).values()
    if any("host" in handler.get(kind, {}) for handler in handlers for kind in ("httpGet", "tcpSocket")):
        yield f"{name} has a probe of another host"
