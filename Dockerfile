# An image of imagemill. docs/how-to/production.md has the services; compose.yaml starts them.
#
#   docker build -t imagemill --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .

# Debian or Ubuntu with Python 3.11 to 3.13 and its venv module.
ARG BASE=docker.io/library/python:3.12.12-slim-bookworm

FROM ${BASE} AS tools
RUN python3 -m venv /opt/tools && /opt/tools/bin/pip install --no-cache-dir uv==0.13.8
WORKDIR /source
COPY requirements.lock ./
# The build backend, by the hashes of the lock.
RUN /opt/tools/bin/uv pip install --python /opt/tools --no-cache --verify-hashes --constraints requirements.lock hatchling editables
COPY pyproject.toml README.md LICENSE ./
COPY imagemill imagemill
COPY assets assets
COPY checks checks
COPY dagster_project dagster_project
COPY io_managers io_managers
COPY resources resources
RUN /opt/tools/bin/uv build --python /opt/tools/bin/python --no-build-isolation --wheel --out-dir /wheels .

FROM ${BASE}
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# New volumes get the mode of these folders, so that any user can write to them.
RUN useradd --no-log-init --uid 10001 --user-group --home-dir /var/lib/imagemill --create-home imagemill \
    && install -d -m 1777 /data /history /models \
    && python3 -m venv --without-pip /opt/imagemill
# A layer of its own, because it is the largest and changes least often. The user of the image cannot write there, so
# without compiled bytecode every process, and every check of health, would compile the packages that it imports.
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/uv pip install --python /opt/imagemill --no-cache --compile-bytecode --index "${TORCH_INDEX}" "${TORCH}"
# The packages of the project and its extras, with the versions and hashes of the lock.
COPY requirements.lock pyproject.toml /opt/imagemill/
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/uv pip install --python /opt/imagemill --no-cache --compile-bytecode --verify-hashes \
        --constraints /opt/imagemill/requirements.lock --requirements /opt/imagemill/pyproject.toml \
        --extra heic --extra parquet --extra postgres --extra s3
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,from=tools,source=/wheels,target=/wheels \
    /opt/tools/bin/uv pip install --python /opt/imagemill --no-cache --compile-bytecode --no-deps --offline /wheels/*.whl

ENV PATH=/opt/imagemill/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    DAGSTER_HOME=/history \
    IMAGEMILL_DATA_ROOT=/data \
    HF_HOME=/models
USER 10001:10001
WORKDIR /var/lib/imagemill
EXPOSE 3000 4000
# It handles SIGTERM and reaps orphans as process 1, so no init is needed.
ENTRYPOINT ["imagemill"]
CMD ["serve", "code", "--host", "0.0.0.0"]
# That of the default command; compose.yaml has one for each service.
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s CMD ["imagemill", "serve", "health", "code"]
