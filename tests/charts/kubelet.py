"""Runs a rendered pod as a process: its variables, volumes and probes, with local paths and ports.

Volumes are written as kubelet writes them: a directory with a link ..data to where the files are.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.charts.helm import Manifest, containers, limiter, one, pods
from tests.support.ports import free_port
from tests.support.servers import Service, http_status

Secrets = Mapping[str, Mapping[str, str]]
"""Secret -> key -> text."""

PORTS = ("PORT", "GRPC_PORT", "DEBUG_PORT", "DEBUG_HOST", "PROMETHEUS_ADDR", "RLS_ADMIN_PORT")


def mount(volume: Manifest, directory: Path, documents: Iterable[Manifest], secrets: Secrets) -> None:
    """Write the content of a volume to a directory."""
    files: dict[str, str] = {}
    if "configMap" in volume:
        files = one(documents, "ConfigMap", volume["configMap"]["name"])["data"]
    for source in [volume, *volume.get("projected", {}).get("sources", [])]:
        if "secret" in source:
            secret = source["secret"]
            kept = secrets[secret.get("secretName") or secret["name"]]
            files |= {item["path"]: kept[item["key"]] for item in secret["items"]}
    directory.mkdir()
    if files:
        first = directory / "..first"
        first.mkdir()
        (directory / "..data").symlink_to(first.name)
        for name, text in files.items():
            (first / name).write_text(text)
            (directory / name).symlink_to(Path("..data") / name)


class Pod(Service):
    """The service of a rendering; `more` overrides rendered variables."""

    def __init__(self, documents: Iterable[Manifest], secrets: Secrets | None = None, **more: object) -> None:
        super().__init__({})
        self.documents = tuple(documents)
        self.secrets = secrets or {}
        self.metrics_port, self.admin_port = free_port(), free_port()
        self.pod, self.container = limiter(self.documents)
        self.paths = self._mount(self.pod, self.container)
        rendered = self.variables(self.container)
        self._environment |= {name: value for name, value in rendered.items() if name not in PORTS}
        if "RLS_ADMIN_PORT" in rendered:
            self._environment["RLS_ADMIN_PORT"] = str(self.admin_port)
        self._environment |= {"PROMETHEUS_ADDR": f"127.0.0.1:{self.metrics_port}", "RLS_DRAIN_DELAY": "0s"}
        self._environment |= {name: str(value) for name, value in more.items()}

    def _mount(self, pod: Manifest, container: Manifest) -> dict[str, Path]:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        paths: dict[str, Path] = {}
        for at in container.get("volumeMounts", []):
            paths[at["mountPath"]] = self.directory / f"{container['name']}-{at['name']}"
            if not paths[at["mountPath"]].exists():
                mount(volumes[at["name"]], paths[at["mountPath"]], self.documents, self.secrets)
        return paths

    def variables(self, container: Manifest) -> dict[str, str]:
        """Return the environment of a container, with the values of its Secrets."""
        given = {}
        for variable in container["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            given[variable["name"]] = (
                self.secrets[reference["name"]][reference["key"]] if reference else self.moved(variable["value"])
            )
        return given

    def moved(self, text: str) -> str:
        """Replace container paths in a text by local ones."""
        for path, here in sorted(self.paths.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(path, str(here))
        return text

    def probe(self, name: str) -> bool:
        """Return the result of a probe of the manifest."""
        how = self.container[f"{name}Probe"]
        if "httpGet" in how:
            return self._http_status(how["httpGet"]) == 200
        with grpc.insecure_channel(self.grpc_address) as channel:
            request = health_pb2.HealthCheckRequest(service=how["grpc"]["service"])
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def ready(self) -> bool:
        how = self.container["readinessProbe"].get("httpGet", {"path": "/healthcheck"})
        return self._http_status(how) == 200 and self._accepts()

    def _http_status(self, how: Manifest) -> int | None:
        """Return the HTTP status of a probe; like kubelet, it accepts any certificate."""
        url = f"{how.get('scheme', 'HTTP').lower()}://127.0.0.1:{self.http_port}{how['path']}"
        return http_status(url, ssl._create_unverified_context())

    def ask(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the command of the rendered test pod, with local addresses and paths."""
        (pod,) = (pod for name, pod in pods(self.documents) if name.startswith("Pod/"))
        (container,) = (one for one in containers(pod) if one["name"] == "ask")
        own = {at["mountPath"] for at in self.container.get("volumeMounts", [])}
        sidecar = any(at["mountPath"] in own for at in container.get("volumeMounts", []))
        if not sidecar and "volumeMounts" in container:
            self.paths |= self._mount(pod, container)
        command: list[Any] = [self.moved(part) for part in container["command"]]
        if not sidecar:
            command[command.index("--server") + 1] = f"localhost:{self.grpc_port}"
        return _run([*command, *more])

    def migrate(self) -> subprocess.CompletedProcess[str]:
        """Run the migration Job with only its own variables."""
        (pod,) = (pod for name, pod in pods(self.documents) if name.startswith("Job/"))
        (container,) = containers(pod)
        self.paths |= self._mount(pod, container)
        return _run(container["command"], self.variables(container))


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    line = [Path(sys.executable).with_name(command[0]), *command[1:]]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=30)  # type: ignore[arg-type]
