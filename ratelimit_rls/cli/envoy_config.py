"""`envoy-config`: generate the Envoy configuration for rules, for plain Envoy, Istio or Envoy Gateway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable, format_count
from ratelimit_rls.cli.rules_arguments import load_rules, read_sources, rules_arguments
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.core.tree import Node, Tree
    from ratelimit_rls.envoy_config.descriptors import DomainDescriptors, MappingWarning
    from ratelimit_rls.envoy_config.mapping import MappedKey
    from ratelimit_rls.envoy_config.options import EnvoyConfigOptions, ServiceAddress
    from ratelimit_rls.envoy_config.resources import EnvoyResources

FORMS = ("bootstrap", "fragments", "istio", "envoy-gateway")

CLUSTER = "ratelimit-rls"

_EXAMPLES = """\b
Examples:
  # an Envoy on port 10000 that rate limits users in front of the upstream on port 8000
  $ ratelimit-rls envoy-config descriptors/per_user.yaml --from user=header:x-user > envoy.yaml
  $ envoy -c envoy.yaml
  # configuration fragments for an existing Envoy, over mutual TLS
  $ ratelimit-rls envoy-config descriptors/nested.yaml --from tenant=header:x-tenant --from user=header:x-user \\
      --format fragments --server rls.internal:8081 --cacert ca.pem --cert envoy.pem --key envoy.key
  # for Istio's ingress gateway; fail if a rule can never match
  $ ratelimit-rls envoy-config descriptors/wildcard_path.yaml --from path=path --strict \\
      --format istio --server ratelimit-rls.limits.svc.cluster.local:8081 | kubectl apply -f -"""


@click.command("envoy-config", epilog=_EXAMPLES, short_help="Generate the Envoy configuration for rules.")
@rules_arguments
@click.option("--domain", "domains", multiple=True, help="Only this domain; may be repeated.  [default: all domains]")
@click.option(
    "--from",
    "sources",
    metavar="KEY=SOURCE",
    multiple=True,
    help="Source of the value of a descriptor key; may be repeated.",
)
@click.option(
    "--mapping", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="YAML file with KEY: SOURCE pairs."
)
@click.option("--strict", is_flag=True, help="Exit with 3 and write nothing if there are warnings.")
@click.option("--ext-authz", is_flag=True, help="Configure the ext_authz filter instead of the rate limit filter.")
@click.option(
    "--format", "form", type=click.Choice(FORMS), default="bootstrap", show_default=True, help="Kind of output."
)
@click.option(
    "--rate-limits-on",
    "place",
    type=click.Choice(["virtual-host", "filter"]),
    help="Where the rate limit actions are configured; filter needs Envoy 1.36 or later. [default: virtual-host; "
    "filter with --format envoy-gateway]",
)
@click.option(
    "--server",
    metavar="HOST:PORT|unix:PATH",
    help="Address of the service as seen by Envoy. [default: 127.0.0.1:8081; required with istio and envoy-gateway]",
)
@click.option("--cacert", help="Use TLS: path on Envoy's host of the CA of the service's certificate.")
@click.option("--cert", help="Use mutual TLS: path on Envoy's host of Envoy's client certificate.")
@click.option("--key", help="Path on Envoy's host of the private key of --cert.")
@click.option("--server-name", help="Name expected in the service's certificate. [default: the host of --server]")
@click.option(
    "--health-check",
    is_flag=True,
    help="Configure gRPC health checks, so that Envoy stops sending calls to draining replicas.",
)
@click.option(
    "--timeout",
    metavar="DURATION",
    help="Timeout of each call. [default: 100ms plus the longest max_delay of the rules]",
)
@click.option(
    "--deny-on-failure", is_flag=True, help="Deny requests when the service does not respond. [default: allow them]"
)
@click.option("--no-x-ratelimit-headers", is_flag=True, help="Do not let Envoy add X-RateLimit-* headers to responses.")
@click.option(
    "--listen", metavar="IP:PORT", help="With bootstrap: address Envoy listens on. [default: 127.0.0.1:10000]"
)
@click.option(
    "--upstream", metavar="HOST:PORT", help="With bootstrap: address of the upstream. [default: 127.0.0.1:8000]"
)
@click.option("--name", help="With istio, envoy-gateway: name of the resource. [default: ratelimit-rls]")
@click.option(
    "--namespace",
    help="With istio, envoy-gateway: namespace of the resource. [default: istio-system with istio, "
    "default with envoy-gateway]",
)
@click.option(
    "--workload",
    "workloads",
    metavar="LABEL=VALUE",
    multiple=True,
    help="With istio: label of the pods to configure; may be repeated. [default: istio=ingressgateway]",
)
@click.option(
    "--context", type=click.Choice(["gateway", "sidecar"]), help="With istio: role of the pods. [default: gateway]"
)
@click.option("--gateway", help="With envoy-gateway: name of the Gateway. [default: eg]")
@click.option(
    "--listener",
    help="With envoy-gateway: name of the listener in Envoy, e.g. tcp-80. [default: NAMESPACE/GATEWAY/http]",
)
def envoy_config(
    paths: tuple[Path, ...],
    merge_domains: bool,
    domains: tuple[str, ...],
    sources: tuple[str, ...],
    mapping: Path | None,
    strict: bool,
    ext_authz: bool,
    form: str,
    place: str | None,
    timeout: str | None,
    deny_on_failure: bool,
    no_x_ratelimit_headers: bool,
    **format_options: Any,
) -> ExitCode:
    """Generate the Envoy configuration for rules: filter, cluster, and the actions that create the descriptors.

    PATHS are rules files, or directories of rules files. Each KEY of their descriptors needs a SOURCE. The keys
    remote_address, source_cluster and destination_cluster need none: each is its own source.

    \b
      header:x-user     query:page     method     host     scheme     value:free
      path              path:/users/{id},/users/{id}/orders/**
      remote_address    masked_remote_address:24,64
      metadata:envoy.filters.http.jwt_authn:payload:sub

    Rules that no descriptor can match, and keys of the mapping that no rule uses, are reported on stderr and at the top
    of the output. With --ext-authz the descriptors come from `ext_authz` of the rules, and no mapping is needed.
    """
    tree = load_rules(paths, merge_domains).tree
    _check_flags(form, place, ext_authz, bool(sources or mapping), format_options)
    options = _options(form, timeout, deny_on_failure, not no_x_ratelimit_headers, format_options)
    remarks: list[MappingWarning] = []
    if ext_authz:
        side = _ext_authz_resources(tree, domains, form, options)
    else:
        roots = _selected_domains(tree, domains)
        plans, remarks = _plans(roots, _mapping(sources, mapping))
        for remark in remarks:
            click.echo(escape_unprintable(str(remark)), err=True)
        side = _rate_limit_resources(plans, form, place, options)
    if strict and remarks:
        click.echo(f"{format_count(len(remarks), 'warning')}: nothing was written", err=True)
        return ExitCode.WARNINGS
    click.echo(_text(side, form, remarks, format_options), nl=False)
    return ExitCode.DONE


_ONLY_WITH = {
    "listen": ("bootstrap",),
    "upstream": ("bootstrap",),
    "name": ("istio", "envoy-gateway"),
    "namespace": ("istio", "envoy-gateway"),
    "workloads": ("istio",),
    "context": ("istio",),
    "gateway": ("envoy-gateway",),
    "listener": ("envoy-gateway",),
}


def _check_flags(
    form: str, place: str | None, ext_authz: bool, mapped: bool, format_options: Mapping[str, Any]
) -> None:
    for name, forms in _ONLY_WITH.items():
        if format_options[name] and form not in forms:
            flag = "--" + name.removesuffix("s")
            raise click.UsageError(f"{flag} needs --format {' or '.join(forms)}")
    if form == "envoy-gateway" and place == "virtual-host":
        raise click.UsageError(
            "--format envoy-gateway needs --rate-limits-on filter: a patch cannot name every virtual host"
        )
    if ext_authz and (mapped or place):
        raise click.UsageError(
            "--ext-authz uses the descriptors of 'ext_authz' in the rules: omit --from, --mapping and --rate-limits-on"
        )
    _listen_and_upstream(format_options)


# ── selection ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _selected_domains(tree: Tree, domains: tuple[str, ...]) -> list[Node]:
    unknown = [domain for domain in domains if domain not in tree.domains]
    if unknown:
        raise SettingsError(f"unknown domain {unknown[0]!r}; the rules have {', '.join(tree.domains)}")
    return [root for name, root in tree.domains.items() if not domains or name in domains]


def _mapping(sources: tuple[str, ...], file: Path | None) -> dict[str, MappedKey]:
    from ratelimit_rls.envoy_config.mapping import default_mapping, from_file, from_flags

    (written,) = read_sources((file,)) if file else (None,)
    return {**default_mapping(), **(from_file(written) if written else {}), **from_flags(sources)}


def _plans(roots: list[Node], mapping: Mapping[str, MappedKey]) -> tuple[list[DomainDescriptors], list[MappingWarning]]:
    from ratelimit_rls.envoy_config.descriptors import plan_descriptors, unused_keys

    planned = [plan_descriptors(root, mapping) for root in roots]
    remarks = [remark for _, found in planned for remark in found] + unused_keys(roots, mapping)
    return [one for one, _ in planned if one.descriptors], remarks


def _rate_limit_resources(
    plans: list[DomainDescriptors], form: str, place: str | None, options: EnvoyConfigOptions
) -> EnvoyResources:
    if not plans:
        raise SettingsError("Envoy cannot create a descriptor for any rule; use --from KEY=SOURCE")
    on_filter = form == "envoy-gateway" or place == "filter"

    from ratelimit_rls.envoy_config.resources import MAX_STAGES, rate_limit_resources

    if len(plans) > MAX_STAGES and not on_filter:
        raise SettingsError(
            f"the rules have {len(plans)} domains, but a virtual host can hold {MAX_STAGES}; "
            "select some with --domain, or use --rate-limits-on filter"
        )
    return rate_limit_resources(
        plans, options, on_filter=on_filter, with_cluster=not options.authority, **_filter_name(form)
    )


def _ext_authz_resources(
    tree: Tree, domains: tuple[str, ...], form: str, options: EnvoyConfigOptions
) -> EnvoyResources:
    roots = [root for root in _selected_domains(tree, domains) if root.key in tree.mappings or domains]
    lacking = [root.key for root in roots if root.key not in tree.mappings]
    if lacking or not roots:
        which = f"the domain {lacking[0]!r}" if lacking else "no domain of these rules"
        raise SettingsError(f"{which} has {'no' if lacking else 'an'} 'ext_authz', which defines the descriptors")

    from ratelimit_rls.envoy_config.descriptors import max_wait_us
    from ratelimit_rls.envoy_config.resources import ext_authz_resources

    send_domain = len(tree.mappings) > 1
    if send_domain and form == "envoy-gateway":
        raise SettingsError(
            "several domains have 'ext_authz', and a patch cannot set the domain of every virtual host; "
            "pass the rules of one domain only, and set RLS_EXT_AUTHZ_DOMAIN in the service"
        )
    mappings = {root.key: tree.mappings[root.key] for root in roots}
    waits_us = {root.key: max_wait_us(root) for root in roots}
    own_cluster, named = not options.authority, _filter_name(form)
    return ext_authz_resources(
        mappings, tree.identities, waits_us, options, send_domain=send_domain, with_cluster=own_cluster, **named
    )


def _filter_name(form: str) -> dict[str, str]:
    """Return a filter name of our own for Envoy Gateway, whose routes configure the filters of the usual names."""
    return {"name": CLUSTER} if form == "envoy-gateway" else {}


# ── connection ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _options(
    form: str, timeout: str | None, deny_on_failure: bool, x_ratelimit_headers: bool, format_options: Mapping[str, Any]
) -> EnvoyConfigOptions:
    from ratelimit_rls.envoy_config.options import EnvoyConfigOptions, parse_timeout

    server = _server(form, format_options)
    # Istio has a cluster for every service of the mesh and uses the mesh's own mTLS on it.
    in_mesh = form == "istio" and bool(server.host) and not server.is_ip and not server.tls
    if in_mesh and server.health_check:
        raise click.UsageError(
            "--health-check needs its own cluster, but Istio already has one for this service; omit --health-check"
        )
    return EnvoyConfigOptions(
        server,
        cluster=f"outbound|{server.port}||{server.host}" if in_mesh else CLUSTER,
        authority=server.host if in_mesh else "",
        timeout_us=None if timeout is None else _parse_option("--timeout", timeout, parse_timeout),
        deny_on_failure=deny_on_failure,
        x_ratelimit_headers=x_ratelimit_headers,
    )


def _server(form: str, format_options: Mapping[str, Any]) -> ServiceAddress:
    from ratelimit_rls.envoy_config.options import ServiceAddress, UpstreamTls, parse_host_port

    text = format_options["server"]
    if text is None:
        if form in ("istio", "envoy-gateway"):
            raise click.UsageError("--server is required, e.g. ratelimit-rls.default.svc.cluster.local:8081")
        text = "127.0.0.1:8081"
    cacert, cert, key, name = (format_options[name] for name in ("cacert", "cert", "key", "server_name"))
    if (cert is None) != (key is None):
        raise click.UsageError("--cert and --key must be given together")
    if cacert is None and (cert or name):
        raise click.UsageError("--cert and --server-name need --cacert: without it Envoy would trust any certificate")
    unix_socket = text.removeprefix("unix:").removeprefix("//") if text.startswith("unix:") else ""
    if unix_socket and cacert and not name:
        raise click.UsageError("--cacert with a Unix socket needs --server-name: there is no host name to verify")
    host, port = ("", 0) if unix_socket else _parse_option("--server", text, parse_host_port)
    tls = UpstreamTls(cacert, cert or "", key or "", name or "") if cacert else None
    return ServiceAddress(host, port, unix_socket, tls, format_options["health_check"])


def _parse_option(flag: str, text: str, parse: Any) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise click.UsageError(f"{flag} {text!r} {error}") from None


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _text(side: EnvoyResources, form: str, remarks: Iterable[MappingWarning], format_options: Mapping[str, Any]) -> str:
    from ratelimit_rls.cli.yaml_text import yaml_text

    comments = ["Written by `ratelimit-rls envoy-config`.", *(str(remark) for remark in remarks)]
    header = "".join(f"# {escape_unprintable(comment)}\n" for comment in comments)
    return header + "".join(
        (f"\n# {comment}\n" if comment else "") + yaml_text([document])
        for comment, document in _documents(side, form, format_options)
    )


def _documents(side: EnvoyResources, form: str, format_options: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return each document with the comment that precedes it."""
    from ratelimit_rls.envoy_config.bootstrap import common_http_protocol_options
    from ratelimit_rls.envoy_config.kubernetes import GatewayTarget, IstioTarget, envoy_filter, envoy_patch_policy
    from ratelimit_rls.envoy_config.serialize import to_json_dict

    name, namespace = format_options["name"] or CLUSTER, format_options["namespace"]
    if form == "istio":
        context = "SIDECAR_INBOUND" if format_options["context"] == "sidecar" else "GATEWAY"
        target = IstioTarget(name, namespace or "istio-system", _labels(format_options["workloads"]), context)
        return [("", envoy_filter(side, target))]
    if form == "envoy-gateway":
        namespace, gateway = namespace or "default", format_options["gateway"] or "eg"
        listener = format_options["listener"] or f"{namespace}/{gateway}/http"
        return [("", envoy_patch_policy(side, GatewayTarget(name, namespace, gateway, listener)))]
    if form == "bootstrap":
        return [("", to_json_dict(_bootstrap(side, format_options)))]
    common = {"common_http_protocol_options": to_json_dict(common_http_protocol_options())}
    documents: list[tuple[str, dict[str, Any]]] = [
        (
            "Goes into the HTTP connection manager, before the router.",
            {"http_filters": [*map(to_json_dict, side.filters)]},
        ),
        ("Goes into the HTTP connection manager: many upstreams treat x_user as x-user.", common),
    ]
    if side.rate_limits:
        comment = "Goes into the virtual host; a route with its own rate_limits ignores these."
        documents.append((comment, {"rate_limits": [*map(to_json_dict, side.rate_limits)]}))
    if side.per_host:
        per_host = {name: to_json_dict(config) for name, config in side.per_host.items()}
        documents.append(("Goes into the virtual host.", {"typed_per_filter_config": per_host}))
    assert side.cluster is not None
    return [*documents, ("Goes into the static resources.", {"clusters": [to_json_dict(side.cluster)]})]


def _bootstrap(side: EnvoyResources, format_options: Mapping[str, Any]) -> Any:
    from ratelimit_rls.envoy_config.bootstrap import bootstrap

    return bootstrap(side, *_listen_and_upstream(format_options))


def _listen_and_upstream(format_options: Mapping[str, Any]) -> tuple[tuple[str, int], tuple[str, int]]:
    from ratelimit_rls.envoy_config.options import parse_host_port, parse_listen

    listen = _parse_option("--listen", format_options["listen"] or "127.0.0.1:10000", parse_listen)
    return listen, _parse_option("--upstream", format_options["upstream"] or "127.0.0.1:8000", parse_host_port)


def _labels(workloads: tuple[str, ...]) -> dict[str, str]:
    pairs = [workload.partition("=") for workload in workloads or ("istio=ingressgateway",)]
    if not all(label and equals and value for label, equals, value in pairs):
        raise click.UsageError("--workload must be LABEL=VALUE, e.g. app=shop")
    return {label: value for label, _, value in pairs}
