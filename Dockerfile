# The trainer for TPUs, under both controllers. Nothing but packages is fetched when it is built, nothing at run time.
# launch/README.md says how to build and push it, and how a pod starts it. For a build that can be repeated, give the
# base by digest: --build-arg BASE=python:3.12-slim-bookworm@sha256:...
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# The manifests run the container as this user (launch/pods.py).
RUN useradd --create-home --uid 1000 longscan
WORKDIR /opt/longscan
RUN python -m venv .venv && .venv/bin/python -m pip install --no-cache-dir uv
COPY pyproject.toml requirements.lock ./
RUN .venv/bin/python -m uv pip install --no-cache --python .venv -r pyproject.toml --extra tpu --extra pathways -c requirements.lock
COPY app app
COPY configs configs
COPY data data
COPY launch launch

ENV PATH=/opt/longscan/.venv/bin:$PATH PYTHONUNBUFFERED=1
USER longscan
# No shell: signals reach Python.
ENTRYPOINT ["python", "-m", "app.train"]
