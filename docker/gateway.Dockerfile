# syntax=docker/dockerfile:1
# The gateway: no torch, no weights. Build it from the repository's root.
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS build
RUN python -m venv /opt/meshnet
WORKDIR /src
COPY docker/constraints.txt docker/
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY gateway gateway
COPY shard shard
RUN /opt/meshnet/bin/pip install --no-cache-dir --no-compile --constraint docker/constraints.txt '.[gateway]'

FROM python:${PYTHON}
RUN groupadd --gid 10001 meshnet \
 && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin meshnet \
 && install --directory --owner=10001 --group=10001 /models
COPY --from=build /opt/meshnet /opt/meshnet
ENV PATH=/opt/meshnet/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["meshnet"]
CMD ["gateway", "--help"]
