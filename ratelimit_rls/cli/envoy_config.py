"""`envoy-config`: the Envoy side of rules, in the form that an Envoy, Istio or Envoy Gateway takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.rules import load, read, rules_arguments
from ratelimit_rls.cli.words import counted, printable
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.core.tree import Node, Tree
    from ratelimit_rls.envoy_config.descriptors import Plan, Remark
    from ratelimit_rls.envoy_config.envoy_side import EnvoySide
    from ratelimit_rls.envoy_config.mapping import Mapped
    from ratelimit_rls.envoy_config.options import Options, Server

FORMS = ("bootstrap", "fragments", "istio", "envoy-gateway")

CLUSTER = "ratelimit-rls"

_EXAMPLES = """\b
Examples:
  # an Envoy on port 10000 that limits users before the upstream on port 8000
  $ ratelimit-rls envoy-config descriptors/per_user.yaml --from user=header:x-user > envoy.yaml
  $ envoy -c envoy.yaml
  # the parts of it, for an Envoy that is there already, over mutual TLS
  $ ratelimit-rls envoy-config descriptors/nested.yaml --from tenant=header:x-tenant --from user=header:x-user \\
      --format fragments --server rls.internal:8081 --cacert ca.pem --cert envoy.pem --key envoy.key
  # for Istio's ingress gateway; fail if a rule can never be met
  $ ratelimit-rls envoy-config descriptors/wildcard_path.yaml --from path=path --strict \\
      --format istio --server ratelimit-rls.limits.svc.cluster.local:8081 | kubectl apply -f -"""


@click.command("envoy-config", epilog=_EXAMPLES)
@rules_arguments
@click.option("--domain", "domains", multiple=True, help="Only this domain; may be repeated. Default: every one.")
@click.option("--from", "sources", metavar="KEY=SOURCE", multiple=True, help="Where the value of a key comes from.")
@click.option(
    "--mapping", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A YAML file of KEY: SOURCE."
)
@click.option("--strict", is_flag=True, help="Write nothing and exit with 3 if there are warnings.")
@click.option("--ext-authz", is_flag=True, help="The ext_authz filter in place of the rate limit filter.")
@click.option("--format", "form", type=click.Choice(FORMS), default="bootstrap", show_default=True)
@click.option(
    "--rate-limits-on",
    "place",
    type=click.Choice(["virtual-host", "filter"]),
    help="Where descriptors are described; the filter takes them from Envoy 1.36 on. [default: virtual-host; "
    "filter with envoy-gateway]",
)
@click.option(
    "--server",
    metavar="HOST:PORT|unix:PATH",
    help="The service as Envoy reaches it. [default: 127.0.0.1:8081; none with istio and envoy-gateway]",
)
@click.option("--cacert", help="Use TLS: the CA of the service's certificate, a file as Envoy sees it.")
@click.option("--cert", help="Envoy's own certificate, likewise: mutual TLS.")
@click.option("--key", help="Its private key, likewise.")
@click.option("--server-name", help="Name in the service's certificate. [default: the host of --server]")
@click.option("--health-check", is_flag=True, help="Ask the service's health by gRPC, and leave replicas that drain.")
@click.option(
    "--timeout",
    metavar="DURATION",
    help="For each answer. [default: 100ms, and the longest max_delay of the rules on top]",
)
@click.option("--deny-on-failure", is_flag=True, help="Refuse what the service did not answer. [default: let it pass]")
@click.option("--no-x-ratelimit-headers", is_flag=True, help="Do not have Envoy add X-RateLimit-* to answers.")
@click.option("--listen", metavar="IP:PORT", help="bootstrap: where Envoy listens. [default: 127.0.0.1:10000]")
@click.option("--upstream", metavar="HOST:PORT", help="bootstrap: what stands behind it. [default: 127.0.0.1:8000]")
@click.option("--name", help="istio, envoy-gateway: of the resource. [default: ratelimit-rls]")
@click.option("--namespace", help="istio, envoy-gateway: of the resource. [default: istio-system; default]")
@click.option(
    "--workload", "workloads", metavar="LABEL=VALUE", multiple=True, help="istio: pods. [default: istio=ingressgateway]"
)
@click.option("--context", type=click.Choice(["gateway", "sidecar"]), help="istio: what the pods run.")
@click.option("--gateway", help="envoy-gateway: the Gateway. [default: eg]")
@click.option("--listener", help="envoy-gateway: its listener in Envoy, e.g. tcp-80. [default: NAMESPACE/GATEWAY/http]")
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
    **of_form: Any,
) -> ExitCode:
    """Write the Envoy side of rules: filter, cluster, and the actions that make the descriptors.

    PATHS are rules files, or directories of them. Each KEY of their descriptors needs a SOURCE, but for remote_address,
    source_cluster and destination_cluster, which are what they are called:

    \b
      header:x-user     query:page     method     host     scheme     value:free
      path              path:/users/{id},/users/{id}/orders/**
      remote_address    masked_remote_address:24,64
      metadata:envoy.filters.http.jwt_authn:payload:sub

    Rules that no descriptor can meet, and keys of the mapping that no rule has, are told on stderr and at the top of
    what is written. With --ext-authz the rules make the descriptors themselves, and there is no mapping.
    """
    tree = load(paths, merge_domains).tree
    _check_flags(form, place, ext_authz, bool(sources or mapping), of_form)
    options = _options(form, timeout, deny_on_failure, not no_x_ratelimit_headers, of_form)
    remarks: list[Remark] = []
    if ext_authz:
        side = _by_ext_authz(tree, domains, form, options)
    else:
        roots = _chosen(tree, domains)
        plans, remarks = _plans(roots, _mapping(sources, mapping))
        for remark in remarks:
            click.echo(printable(str(remark)), err=True)
        side = _by_rate_limits(plans, form, place, options)
    if strict and remarks:
        click.echo(f"{counted(len(remarks), 'warning')}: nothing was written", err=True)
        return ExitCode.WARNINGS
    click.echo(_text(side, form, remarks, of_form), nl=False)
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


def _check_flags(form: str, place: str | None, ext_authz: bool, mapped: bool, of_form: Mapping[str, Any]) -> None:
    for name, forms in _ONLY_WITH.items():
        if of_form[name] and form not in forms:
            flag = "--" + name.removesuffix("s")
            raise click.UsageError(f"{flag} belongs to --format {' or '.join(forms)}")
    if form == "envoy-gateway" and place == "virtual-host":
        raise click.UsageError("with --format envoy-gateway the filter has the descriptors: no patch names every host")
    if ext_authz and (mapped or place):
        raise click.UsageError(
            "with --ext-authz the rules' own 'ext_authz' makes the descriptors: leave the mapping out"
        )
    _listen_and_upstream(of_form)


# ── what is written ──────────────────────────────────────────────────────────────────────────────────────────────────


def _chosen(tree: Tree, domains: tuple[str, ...]) -> list[Node]:
    unknown = [domain for domain in domains if domain not in tree.domains]
    if unknown:
        raise SettingsError(f"there is no domain {unknown[0]!r}; there are {', '.join(tree.domains)}")
    return [root for name, root in tree.domains.items() if not domains or name in domains]


def _mapping(sources: tuple[str, ...], file: Path | None) -> dict[str, Mapped]:
    from ratelimit_rls.envoy_config.mapping import from_file, from_flags, obvious

    (written,) = read((file,)) if file else (None,)
    return {**obvious(), **(from_file(written) if written else {}), **from_flags(sources)}


def _plans(roots: list[Node], mapping: Mapping[str, Mapped]) -> tuple[list[Plan], list[Remark]]:
    from ratelimit_rls.envoy_config.descriptors import plan, unused

    planned = [plan(root, mapping) for root in roots]
    remarks = [remark for _, told in planned for remark in told] + unused(roots, mapping)
    return [one for one, _ in planned if one.descriptors], remarks


def _by_rate_limits(plans: list[Plan], form: str, place: str | None, options: Options) -> EnvoySide:
    if not plans:
        raise SettingsError("Envoy could make no descriptor of the rules at all")
    on_filter = form == "envoy-gateway" or place == "filter"

    from ratelimit_rls.envoy_config.envoy_side import MOST_STAGES, of_rate_limits

    if len(plans) > MOST_STAGES and not on_filter:
        raise SettingsError(
            f"there are {len(plans)} domains, and a virtual host can keep {MOST_STAGES} apart; "
            "choose with --domain, or use --rate-limits-on filter"
        )
    return of_rate_limits(plans, options, on_filter=on_filter, own_cluster=not options.authority, **_filter_name(form))


def _by_ext_authz(tree: Tree, domains: tuple[str, ...], form: str, options: Options) -> EnvoySide:
    roots = [root for root in _chosen(tree, domains) if root.key in tree.mappings or domains]
    lacking = [root.key for root in roots if root.key not in tree.mappings]
    if lacking or not roots:
        which = f"the domain {lacking[0]!r}" if lacking else "no domain of these rules"
        raise SettingsError(f"{which} has {'no' if lacking else 'an'} 'ext_authz', which would make the descriptors")

    from ratelimit_rls.envoy_config.descriptors import longest_wait_us
    from ratelimit_rls.envoy_config.envoy_side import of_ext_authz

    tell_domain = len(tree.mappings) > 1
    if tell_domain and form == "envoy-gateway":
        raise SettingsError(
            "several domains have 'ext_authz', and no patch could tell every virtual host which one is meant; "
            "give this command the rules of one, and the service RLS_EXT_AUTHZ_DOMAIN"
        )
    mappings = {root.key: tree.mappings[root.key] for root in roots}
    waits_us = {root.key: longest_wait_us(root) for root in roots}
    own_cluster, named = not options.authority, _filter_name(form)
    return of_ext_authz(mappings, waits_us, options, tell_domain=tell_domain, own_cluster=own_cluster, **named)


def _filter_name(form: str) -> dict[str, str]:
    """Envoy Gateway has filters under the usual names, and tells its routes what they are to do there."""
    return {"name": CLUSTER} if form == "envoy-gateway" else {}


# ── how Envoy asks ───────────────────────────────────────────────────────────────────────────────────────────────────


def _options(
    form: str, timeout: str | None, deny_on_failure: bool, x_ratelimit_headers: bool, of_form: Mapping[str, Any]
) -> Options:
    from ratelimit_rls.envoy_config.options import Options, parse_timeout

    server = _server(form, of_form)
    # Istio has a cluster for every service of the mesh, and speaks the mesh's own TLS on it.
    in_mesh = form == "istio" and bool(server.host) and not server.is_ip and not server.tls
    if in_mesh and server.health_check:
        raise click.UsageError("--health-check needs a cluster of its own, and Istio has one for this service already")
    return Options(
        server,
        cluster=f"outbound|{server.port}||{server.host}" if in_mesh else CLUSTER,
        authority=server.host if in_mesh else "",
        timeout_us=None if timeout is None else _parsed("--timeout", timeout, parse_timeout),
        deny_on_failure=deny_on_failure,
        x_ratelimit_headers=x_ratelimit_headers,
    )


def _server(form: str, of_form: Mapping[str, Any]) -> Server:
    from ratelimit_rls.envoy_config.options import Server, Tls, parse_host_port

    text = of_form["server"]
    if text is None:
        if form in ("istio", "envoy-gateway"):
            raise click.UsageError("--server is missing; use e.g. ratelimit-rls.default.svc.cluster.local:8081")
        text = "127.0.0.1:8081"
    cacert, cert, key, name = (of_form[name] for name in ("cacert", "cert", "key", "server_name"))
    if (cert is None) != (key is None):
        raise click.UsageError("--cert and --key belong together")
    if cacert is None and (cert or name):
        raise click.UsageError("--cert and --server-name need --cacert: without it Envoy would believe any certificate")
    unix_socket = text.removeprefix("unix:").removeprefix("//") if text.startswith("unix:") else ""
    if unix_socket and cacert and not name:
        raise click.UsageError("--cacert on a Unix socket needs --server-name: there is no host to compare with")
    host, port = ("", 0) if unix_socket else _parsed("--server", text, parse_host_port)
    tls = Tls(cacert, cert or "", key or "", name or "") if cacert else None
    return Server(host, port, unix_socket, tls, of_form["health_check"])


def _parsed(flag: str, text: str, parse: Any) -> Any:
    try:
        return parse(text)
    except ValueError as fault:
        raise click.UsageError(f"{flag} {text!r} {fault}") from None


# ── in which form ────────────────────────────────────────────────────────────────────────────────────────────────────


def _text(side: EnvoySide, form: str, remarks: Iterable[Remark], of_form: Mapping[str, Any]) -> str:
    from ratelimit_rls.cli.yaml_text import yaml_text

    comments = ["Written by `ratelimit-rls envoy-config`.", *(str(remark) for remark in remarks)]
    header = "".join(f"# {printable(comment)}\n" for comment in comments)
    return header + "".join(
        (f"\n# {comment}\n" if comment else "") + yaml_text([document])
        for comment, document in _documents(side, form, of_form)
    )


def _documents(side: EnvoySide, form: str, of_form: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each with a comment of its own."""
    from ratelimit_rls.envoy_config.kubernetes import GatewayTarget, IstioTarget, envoy_filter, envoy_patch_policy
    from ratelimit_rls.envoy_config.written import written

    name, namespace = of_form["name"] or CLUSTER, of_form["namespace"]
    if form == "istio":
        context = "SIDECAR_INBOUND" if of_form["context"] == "sidecar" else "GATEWAY"
        target = IstioTarget(name, namespace or "istio-system", _labels(of_form["workloads"]), context)
        return [("", envoy_filter(side, target))]
    if form == "envoy-gateway":
        namespace, gateway = namespace or "default", of_form["gateway"] or "eg"
        listener = of_form["listener"] or f"{namespace}/{gateway}/http"
        return [("", envoy_patch_policy(side, GatewayTarget(name, namespace, gateway, listener)))]
    if form == "bootstrap":
        return [("", written(_bootstrap(side, of_form)))]
    documents: list[tuple[str, dict[str, Any]]] = [
        ("Of the HTTP connection manager, before the router.", {"http_filters": [*map(written, side.filters)]})
    ]
    if side.rate_limits:
        comment = "Of the virtual host; a route with rate_limits of its own does not have these."
        documents.append((comment, {"rate_limits": [*map(written, side.rate_limits)]}))
    if side.per_host:
        told = {name: written(config) for name, config in side.per_host.items()}
        documents.append(("Of the virtual host.", {"typed_per_filter_config": told}))
    assert side.cluster is not None
    return [*documents, ("Of the static resources.", {"clusters": [written(side.cluster)]})]


def _bootstrap(side: EnvoySide, of_form: Mapping[str, Any]) -> Any:
    from ratelimit_rls.envoy_config.bootstrap import bootstrap

    return bootstrap(side, *_listen_and_upstream(of_form))


def _listen_and_upstream(of_form: Mapping[str, Any]) -> tuple[tuple[str, int], tuple[str, int]]:
    from ratelimit_rls.envoy_config.options import parse_host_port, parse_listen

    listen = _parsed("--listen", of_form["listen"] or "127.0.0.1:10000", parse_listen)
    return listen, _parsed("--upstream", of_form["upstream"] or "127.0.0.1:8000", parse_host_port)


def _labels(workloads: tuple[str, ...]) -> dict[str, str]:
    pairs = [workload.partition("=") for workload in workloads or ("istio=ingressgateway",)]
    if not all(label and equals and value for label, equals, value in pairs):
        raise click.UsageError("--workload is LABEL=VALUE; use e.g. app=shop")
    return {label: value for label, _, value in pairs}
