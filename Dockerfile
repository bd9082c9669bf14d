# The trainer with TPU support. Nothing is fetched at run time; see launch/ for how a pod starts it.
FROM python:3.12-slim

RUN useradd --create-home --uid 1000 longscan
WORKDIR /opt/longscan
RUN python -m venv .venv && .venv/bin/python -m pip install --no-cache-dir uv
COPY pyproject.toml requirements.lock ./
RUN .venv/bin/python -m uv pip install --no-cache --python .venv -r pyproject.toml --extra tpu -c requirements.lock
COPY app app
COPY configs configs
COPY data data
COPY launch launch

USER longscan
ENTRYPOINT ["/opt/longscan/.venv/bin/python", "-m", "app.train"]
