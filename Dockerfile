# inspect, convert and diff; verify needs torch, which this image does not have.
#   docker build -t ckptmove .
#   docker run --rm -v "$PWD:/work" ckptmove inspect run.pth
FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY ckptmove ckptmove
COPY docs/ckptmove.1 docs/
RUN python -m venv /opt/ckptmove && /opt/ckptmove/bin/pip install --no-cache-dir .

FROM python:3.13-slim
COPY --from=build /opt/ckptmove /opt/ckptmove
RUN useradd --create-home --uid 1000 ckptmove
USER ckptmove
WORKDIR /work
ENV PYTHONDONTWRITEBYTECODE=1
ENTRYPOINT ["/opt/ckptmove/bin/ckptmove"]
CMD ["--help"]
