# The image of ratelimit-rls. `docker build -t ratelimit-rls .` from the root of a checkout.
#
# The base is named by its tag, so that a rebuild takes its security fixes; whoever wants the same bytes twice gives
# --build-arg BASE=python:3.11-slim-bookworm@sha256:…
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_BUILD_CONSTRAINT=/src/constraints.txt \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY lua lua
COPY ratelimit_rls ratelimit_rls
RUN python -m pip wheel -q --no-deps --wheel-dir /wheels .
# In an environment of its own that has no pip, and of the versions that the tests have.
#
# Bytecode is written now: the file system is read-only later, and every start would compile for two seconds. It is
# never compared with its source, whose dates a copy of a layer need not keep.
RUN python -m venv --without-pip /opt/ratelimit-rls \
    && python -m pip --python /opt/ratelimit-rls/bin/python install -q --no-compile "$(ls /wheels/*.whl)[archive]" \
    && /opt/ratelimit-rls/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/ratelimit-rls/lib \
    && chmod -R go-w /opt/ratelimit-rls

FROM ${BASE}
LABEL org.opencontainers.image.title="ratelimit-rls" \
      org.opencontainers.image.description="The rate limit service that Envoy asks before it lets a request through." \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/ratelimit-rls /opt/ratelimit-rls
# /bin/ratelimit is what gateways start in the reference's image, without arguments: it serves.
RUN ln -s /opt/ratelimit-rls/bin/ratelimit-rls /usr/local/bin/ratelimit-rls \
    && ln -s /opt/ratelimit-rls/bin/ratelimit /bin/ratelimit
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# nobody, by number: Kubernetes' runAsNonRoot cannot look up names.
USER 65534:65534
WORKDIR /
# gRPC, HTTP, debug, admin, metrics.
EXPOSE 8081 8080 6070 8082 9090
# No HEALTHCHECK: Kubernetes ignores it, and elsewhere it would start an interpreter every few seconds to ask what gRPC
# health and /healthcheck tell whoever wants to know.
#
# The entrypoint serves, and knows our other verbs. The reference's image has none, so whoever moves from it says
# `command: /bin/ratelimit`; under Compose that becomes an argument of this one, which ignores it aloud and serves.
ENTRYPOINT ["/bin/ratelimit"]
