# The image of ratelimit-rls. `docker build -t ratelimit-rls .` from the root of a checkout.
#
# A tag may refer to another image tomorrow. For a release, set the base by its digest, and reject anything else:
# --build-arg BASE_IMAGE=python:3.11-slim-bookworm@sha256:… --build-arg REQUIRE_DIGEST=1 (docs/security.md says how to
# find it). Any image with Python 3.11 to 3.14 and glibc works.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG BASE_IMAGE
ARG REQUIRE_DIGEST=
RUN case "${BASE_IMAGE}" in \
      *@sha256:*) ;; \
      *) echo "BASE_IMAGE=${BASE_IMAGE} has no digest: the same build may take another base tomorrow" >&2; \
         test -z "${REQUIRE_DIGEST}" ;; \
    esac
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# Every download has its hash in requirements/, and only this project is built.
#
# The environment of the image has no pip. The environment that builds the wheel is not copied to it.
COPY requirements requirements
RUN python -m venv --without-pip /src/builder \
    && python -m pip --python /src/builder/bin/python install -q --require-hashes --only-binary :all: \
      -r requirements/build.txt \
    && python -m venv --without-pip /opt/ratelimit-rls \
    && python -m pip --python /opt/ratelimit-rls/bin/python install -q --no-compile --require-hashes \
      --only-binary :all: --report dependencies.json -r requirements/image.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY lua lua
COPY ratelimit_rls ratelimit_rls
COPY tools/sbom.py ./
RUN python -m pip --python /src/builder/bin/python wheel -q --no-deps --no-index --no-build-isolation \
      --wheel-dir /wheels . \
    && python -m pip --python /opt/ratelimit-rls/bin/python install -q --no-compile --no-deps --no-index \
      --report project.json /wheels/*.whl \
    && python -m pip --python /opt/ratelimit-rls/bin/python check \
    && /opt/ratelimit-rls/bin/python sbom.py /opt/ratelimit-rls --report dependencies.json --report project.json \
      --base-image "${BASE_IMAGE}" > /opt/ratelimit-rls/sbom.cdx.json
# Bytecode is written now: the file system is read-only later, and every start would compile for two seconds. Python never
# compares it with its source, because a copy of a layer may change the dates of files.
RUN /opt/ratelimit-rls/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/ratelimit-rls/lib \
    && chmod -R go-w /opt/ratelimit-rls

FROM ${BASE_IMAGE}
ARG BASE_IMAGE
LABEL org.opencontainers.image.title="ratelimit-rls" \
      org.opencontainers.image.description="The rate limit service that Envoy asks before it lets a request through." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
COPY --from=build /opt/ratelimit-rls /opt/ratelimit-rls
# /bin/ratelimit is the command that gateways start in the image of envoyproxy/ratelimit, without arguments: it serves.
RUN ln -s /opt/ratelimit-rls/bin/ratelimit-rls /usr/local/bin/ratelimit-rls \
    && ln -s /opt/ratelimit-rls/bin/ratelimit /bin/ratelimit
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# nobody, by number: Kubernetes' runAsNonRoot cannot look up names.
USER 65534:65534
WORKDIR /
# gRPC, HTTP, debug, admin, metrics.
EXPOSE 8081 8080 6070 8082 9090
# No HEALTHCHECK: Kubernetes ignores it, and elsewhere it would start an interpreter every few seconds, although gRPC health
# and /healthcheck report the same.
#
# The entrypoint serves, and accepts our other verbs. The image of envoyproxy/ratelimit has no entrypoint, so its users set
# `command: /bin/ratelimit`. Under Compose that becomes an argument of this entrypoint, which ignores it with a message
# and serves.
ENTRYPOINT ["/bin/ratelimit"]
