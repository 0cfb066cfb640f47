# wangen with a PyTorch that brings CUDA; of the host only the driver is used. docs/containers.md says how.
#
#   docker build --tag wangen .
#   docker build --tag wangen --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .

# Its Python is the 3.11 that the versions in constraints.txt were tested with.
FROM debian:bookworm-slim AS python
# torch.compile builds kernels when it runs, with the compiler and Python's headers; NCCL opens the libraries of
# InfiniBand. Debian keeps only the newest of each version, so none is named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ ibverbs-providers python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/wangen
ENV PATH=/opt/wangen/bin:$PATH

FROM python AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /source

FROM python
# An index of PyTorch that has the version in constraints.txt: cu130 and cu126 (older drivers and cards), or cpu.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
# A layer of its own, the largest: it is built anew only for other versions.
COPY constraints.txt /opt/wangen/
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' /opt/wangen/constraints.txt)"
# Copied and not mounted: buildah would not see that a mounted wheel has changed.
COPY --from=wheel /wheel /opt/wangen/wheel
RUN set -- /opt/wangen/wheel/*.whl && pip install --no-cache-dir --constraint /opt/wangen/constraints.txt "$1[runtime]"

# Any other user may run it as well (docker run --user): whoever it is has a name and a home to write to.
RUN useradd --uid 1000 --create-home wangen && chmod 1777 /home/wangen
ENV HOME=/home/wangen USER=wangen \
    WANGEN_PYTHON=/opt/wangen/bin/python \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["wangen"]
