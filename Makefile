# Everything a fresh machine needs beyond rustup's stable Rust, a C toolchain and Python 3.10+ is
# fetched here by cargo and pip.

PYTHON ?= python3
VENV := .venv
# Kernels are compiled with the oldest version of CUDA that is supported and with one of the next.
NVRTC_PACKAGES := nvidia-cuda-nvrtc-cu12==12.4.127 nvidia-cuda-nvrtc==13.0.88
NVRTC := $(CURDIR)/$(VENV)/lib/python3*/site-packages/nvidia/cu*/lib/libnvrtc.so.1[23]
LOOM_FLAGS := --cfg loom
# Libraries in place of CUDA's driver and compiler, for devices that this machine's processors play.
EMULATOR := $(CURDIR)/target/emulator
EMULATED := LD_LIBRARY_PATH=$(EMULATOR) SYMMPOOL_CACHE_DIR=$(EMULATOR)/kernels
CXXFLAGS := -std=c++20 -g -O2 -fPIC -shared -pthread -Wall -Wextra -Werror
# Ways through every kernel, but for what takes minutes there: repeats and streams.
EMULATED_CHECKS := one_shot_ll,one_shot_ll128,one_shot_lamport,one_shot_pull,two_shot_ll,two_shot_lamport$(\
	),two_shot_pull,two_shot_push,two_shot_copy,all_to_all,all_gather_broadcast,row_exchange,one_sided,p2p
# The tests of what is made for torch run on the CPU, but its Linux package brings CUDA's libraries:
# 5 GB on disk. Another version is tested with, say, `make test TORCH=torch==2.15.0`.
TORCH ?= torch==2.11.0

.PHONY: demo test test-rust test-emulated test-loom test-python torch extension wheel lint bench bench-gpu tables docs clean

## The main job: several rank processes, wrong sums and right ones, timings, a map of the heap.
demo:
	cargo run --release -p symmpool-collectives --example demo

## Every test there is.
test: lint test-rust test-emulated test-loom test-python

lint: $(VENV)/ready
	$(VENV)/bin/ruff check . bench/record_gpu
	$(VENV)/bin/ruff format --check . bench/record_gpu
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items

# Tests that need a device say "skipped: ..." where there is none; --nocapture lets it be seen.
# What kernels take of a device is printed.
test-rust: export SYMMPOOL_TEST_NVRTC = $(shell ls $(NVRTC) | paste -sd:)
test-rust: $(VENV)/ready
	cargo test --workspace --all-features --all-targets --exclude symmpool-tests
	cargo test --workspace --all-features --doc
	cargo test -p symmpool-tests
	cargo test -p symmpool-collectives --all-features --lib jit::tests -- --nocapture
	cargo test -p symmpool-collectives --test devices -- --nocapture

# The CUDA driver's calls and every kernel, with no device: see tests/emulator.
ifneq ($(shell command -v c++),)
test-emulated: $(EMULATOR)/libnvrtc.so.13
	$(EMULATED) cargo test -p symmpool-allocator --all-features --lib driver::cuda -- --nocapture
	$(EMULATED) cargo run -q -p symmpool-allocator --all-features --example cuda_check -- --ranks 3
	$(EMULATED) cargo test -p symmpool-collectives --all-features --lib cuda::
	cargo build -q -p symmpool-collectives --all-features --example cuda_collectives
	$(EMULATED) cargo run -q -p symmpool-collectives --all-features --example cuda_collectives -- \
		check --quick --ranks 2 --algorithms first_calls
	$(EMULATED) cargo run -q -p symmpool-collectives --all-features --example cuda_collectives -- \
		check --quick --ranks 2 --algorithms $(EMULATED_CHECKS)
	$(EMULATED) cargo run -q -p symmpool-collectives --all-features --example cuda_collectives -- \
		check --quick --ranks 3 --algorithms one_shot_ll128,two_shot_lamport,two_shot_copy,one_sided,p2p
	$(EMULATED) cargo run -q -p symmpool-collectives --all-features --example cuda_collectives -- \
		check --quick --ranks 8 --algorithms one_shot_ll128,two_shot_push
	$(EMULATED) cargo run -q -p symmpool-collectives --all-features --example cuda_collectives -- \
		check --quick --ranks 3 --concurrent 2,1,5 --algorithms one_shot_pull,two_shot_pull,two_shot_push
	$(EMULATED) EMULATED_PROCESSORS=16 cargo run -q -p symmpool-collectives --all-features --example cuda_collectives -- \
		check --quick --ranks 3 --algorithms mixed
	$(EMULATED) EMULATED_PROCESSORS=96 cargo run -q -p symmpool-collectives --all-features --example cuda_collectives -- \
		check --quick --ranks 2 --algorithms p2p
	$(EMULATED) cargo run -q -p symmpool-collectives --all-features --example cuda_collectives -- \
		soak --ranks 2 --calls 200
	$(EMULATED) cargo run -q -p symmpool-collectives --all-features --example cuda_collectives -- \
		faults --ranks 2 --timeout 4 --algorithms one_shot_ll,two_shot_push,p2p,late,outside
else
test-emulated:
	@echo "skipped: there is no C++ compiler, which makes the kernels for emulated devices"
endif

# What kernels were compiled to belongs to the libraries they are for.
$(EMULATOR)/libcuda.so.1: $(wildcard tests/emulator/*)
	rm -rf $(EMULATOR)
	mkdir -p $(EMULATOR)
	c++ $(CXXFLAGS) -Wl,-soname,libcuda.so.1 -o $@ $(addprefix tests/emulator/,driver.cpp memory.cpp \
		programs.cpp streams.cpp threads.cpp) -ldl
	ln -s libcuda.so.1 $(EMULATOR)/libcuda.so

$(EMULATOR)/libnvrtc.so.13: $(EMULATOR)/libcuda.so.1
	c++ $(CXXFLAGS) -DEMULATOR_FOLDER='"$(CURDIR)/tests/emulator"' -DEMULATOR_DRIVER='"$<"' -o $@ \
		tests/emulator/compiler.cpp

# Every interleaving of what processes and threads share.
test-loom:
	RUSTFLAGS="$(LOOM_FLAGS)" cargo test --release --target-dir target/loom \
		-p symmpool-allocator -p symmpool-collectives --lib loom

test-python: extension torch
	$(VENV)/bin/python -m pytest -q bench python/tests

# Where torch cannot be had the rest is tested still, and says what is left out.
torch: $(VENV)/ready
	@$(VENV)/bin/python -c "import importlib.metadata as m; exit('torch==' + m.version('torch').split('+')[0] != '$(TORCH)')" 2>/dev/null \
		|| $(VENV)/bin/python -m pip install -q --disable-pip-version-check "$(TORCH)" \
		|| echo "$(TORCH) could not be installed"

# The Python package, in place: python/symmpool in the virtual environment.
extension: $(VENV)/ready
	VIRTUAL_ENV=$(abspath $(VENV)) $(VENV)/bin/maturin develop -q -m python/Cargo.toml

# The Python package as a wheel in dist, for Python 3.10 and newer.
wheel: $(VENV)/ready
	$(VENV)/bin/maturin build -q -m python/Cargo.toml --out dist

$(VENV)/ready: Makefile
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check $(NVRTC_PACKAGES) \
		"maturin>=1.10,<2" "expecttest>=0.2" "ml_dtypes>=0.5" "numpy>=1.26" "pytest>=8,<10" "ruff>=0.17,<0.18"
	touch $@

## Measures on this machine and writes bench/results; `make tables` puts them into the documents and pictures.
bench:
	bench/run

## The same on this machine's GPUs: make bench-gpu RANKS=4
bench-gpu: extension torch
	$(VENV)/bin/python bench/record_gpu --ranks $(RANKS)

tables:
	$(PYTHON) bench/tables.py

## The documents and the Python and Rust API as one site in target/site, with every link checked.
docs: extension $(VENV)/docs-ready
	$(VENV)/bin/python docs/site/build.py

$(VENV)/docs-ready: docs/site/requirements.txt $(VENV)/ready
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -r docs/site/requirements.txt
	touch $@

clean:
	cargo clean
	rm -rf $(VENV) dist
