# Builds the library, installs the Python package, runs the tests. `make help` lists the targets.
# Knows compilers, flags and folders; knows nothing of models. Every folder below is taken by wildcard: a new C file needs no line here.

PYTHON ?= $(or $(shell command -v python),python3)
CC     ?= cc
BUILD  ?= build/obj
SO     ?= py/bw24/libbw24.so
MACHINE := $(shell uname -m)
SYSTEM  := $(shell uname -s)
ifneq ($(SYSTEM),Linux)
$(error bw24 builds on Linux only, found $(SYSTEM))
endif

# ---- flags: the numeric program needs IEEE arithmetic without contraction (docs/numerics.md), so these are not a matter of taste
NUMERIC := -ffp-contract=off -fno-fast-math
OPT     := -O3
CFLAGS   = -std=c11 $(OPT) $(ARCH) $(NUMERIC) -fPIC -fvisibility=hidden -Wall -Wextra -Werror -pthread -Ilibbw24 -MMD -MP $(EXTRA)
LDLIBS  := -lm -lpthread
C_FILES := $(wildcard libbw24/*.c libbw24/formats/*.c libbw24/ref/*.c libbw24/cpu/*.c)
ifeq ($(MACHINE),x86_64)
ARCH := -march=x86-64-v3
else
$(info bw24: $(MACHINE): building the portable backend, no SIMD kernels for this machine yet)
C_FILES := $(filter-out %_avx2.c %_avxvnni.c %_avx512.c,$(C_FILES))
endif
AVX512  := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni
AVXVNNI := -mavxvnni

# ---- variants: SAN=1 (address and undefined-behaviour sanitizers; own object folder), FAULT=n (seeded fault n, for the tests of the gates; only the
# file with the fault is compiled again)
ifeq ($(SAN),1)
BUILD := build/san
OPT   := -O1 -g1 -fno-var-tracking -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
SO    := $(BUILD)/libbw24.so
endif
ifneq ($(FAULT),)
SO     := $(BUILD)/fault$(FAULT)/libbw24.so
FAULTY := $(shell grep -l 'BW_SEEDED.$(FAULT),' $(C_FILES))
ifeq ($(FAULTY),)
$(error FAULT=$(FAULT): no source file has a BW_SEEDED($(FAULT), ...), see libbw24/fault.h)
endif
endif

# ---- CUDA: taken when nvcc is found; CUDA=0 leaves it out, CUDA=1 insists. CUARCH: the card of this machine, else the two that every push compiles
BW24_NVCC ?= $(or $(shell command -v nvcc),$(wildcard /usr/local/cuda/bin/nvcc))
CU_FILES  := $(wildcard libbw24/cu/*.cu)
CUDA      ?= $(if $(and $(BW24_NVCC),$(CU_FILES)),1,0)
ifeq ($(CUDA),1)
ifeq ($(BW24_NVCC),)
$(error CUDA=1, but no nvcc in PATH or /usr/local/cuda/bin; name it with BW24_NVCC=/path/to/nvcc)
endif
CARDS     := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u)
CUARCH    ?= $(or $(patsubst 120,120a,$(patsubst 90,90a,$(CARDS))),90a 120a)
NVCCFLAGS := -std=c++17 -O3 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true -Ilibbw24 -MMD -MP \
             -Xcompiler -fPIC,-fvisibility=hidden,-ffp-contract=off $(foreach a,$(CUARCH),-gencode arch=compute_$(a),code=sm_$(a))
CU_OBJ    := $(CU_FILES:%.cu=$(BUILD)/%.cu.o)
EXTRA     += -DBW24_CUDA
LINK      := $(BW24_NVCC) -shared -cudart static
else
LINK      := $(CC) -shared $(OPT) -Wl,-z,defs
endif

OBJ     := $(filter-out $(FAULTY),$(C_FILES))
OBJ     := $(OBJ:%.c=$(BUILD)/%.o) $(FAULTY:%.c=$(dir $(SO))%.o)
CTESTS  := $(patsubst tests/c/test_%.c,%,$(wildcard tests/c/test_*.c))
C_TESTS := $(CTESTS:%=$(BUILD)/tests/test_%)
PYTEST  := $(PYTHON) -m pytest
# each step is one short line; V=1 shows whole commands
Q   := $(if $(filter 1,$(V)),,@)
SAY  = $(if $(Q),@printf '  %-5s %s\n' $(1) $(2))
JOBS     = $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc)) # all cores, unless -j was given
# Python tests that are about the C code; leaks are left to the C tests, the interpreter has its own
SANITIZED := tests/test_gate.py tests/test_sampling.py tests/test_gguf_hostile.py
PIP     := $(PYTHON) -m pip install --quiet --disable-pip-version-check

.PHONY: all lib install test test-full test-faults ctest soak check lint fuzz sanitize cuda-objects release-cuda wheel release release-all clean help FORCE

all: ## build the library and install the Python package (the default)
	@$(PYTHON) scripts/python_env.py check
	@$(MAKE) --no-print-directory $(JOBS) lib
	@$(MAKE) --no-print-directory install

lib: $(SO) ## build the library alone

install: ## install the Python package, editable, with what it needs (nothing to do when it is)
	@$(PYTHON) scripts/python_env.py installed || $(PIP) --editable .

$(SO): $(OBJ) $(CU_OBJ) $(BUILD)/flags
	$(call SAY,link,$@)
	$(Q)$(LINK) -o $@ $(OBJ) $(CU_OBJ) $(LDLIBS)
	@if [ "$@" = py/bw24/libbw24.so ]; then cp libbw24/bw24.h py/bw24/bw24.h; fi

# build/obj/flags and build/obj/revision change only when their content does; every object depends on the first, one object on the second
# (private: flags of one object must not reach its prerequisites)
$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(call SAY,cc,$<)
	$(Q)$(CC) $(CFLAGS) -c -o $@ $<
ifneq ($(FAULT),)
$(FAULTY:%.c=$(dir $(SO))%.o): $(dir $(SO))%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(call SAY,cc,$<)
	$(Q)$(CC) $(CFLAGS) -DBW24_FAULT=$(FAULT) -c -o $@ $<
endif
$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(call SAY,nvcc,$<)
	$(Q)$(BW24_NVCC) $(NVCCFLAGS) -Xptxas -v -c -o $@ $< 2> $(@:.o=.ptxas) || { cat $(@:.o=.ptxas) >&2; exit 1; }
	@grep -i warning $(@:.o=.ptxas) >&2 || true
$(filter %_avx512.o,$(OBJ)): private CFLAGS += $(AVX512)
$(filter %_avxvnni.o,$(OBJ)): private CFLAGS += $(AVXVNNI)
# no result depends on it: nobody reads exception flags, and loops over a vocabulary become vectors
$(BUILD)/libbw24/sample.o: private CFLAGS += -fno-trapping-math
$(BUILD)/libbw24/abi.o: private CFLAGS += -DBW24_REVISION='"$(shell cat $(BUILD)/revision)"'
$(BUILD)/libbw24/abi.o: $(BUILD)/revision

WRITE_IF_NEW = cmp -s $@.new $@ && rm $@.new || mv $@.new $@
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(CFLAGS) $(AVX512) $(AVXVNNI) $(LINK) $(NVCCFLAGS)' > $@.new; $(WRITE_IF_NEW)
$(BUILD)/revision: FORCE
	@mkdir -p $(@D)
	@$(PYTHON) scripts/python_env.py revision > $@.new; $(WRITE_IF_NEW)

# ---- tests
CUDA_HOME := $(dir $(realpath $(BW24_NVCC)))..
CUDART = $(firstword $(wildcard $(foreach d,$(CUDA_HOME) /usr/local/cuda,$(d)/lib64/libcudart_static.a $(d)/lib/libcudart_static.a)))
$(BUILD)/tests/%: tests/c/%.c $(OBJ) $(CU_OBJ)
	@mkdir -p $(@D)
	$(call SAY,cc,$<)
	$(Q)$(CC) $(CFLAGS) -o $@ $< $(OBJ) $(CU_OBJ) $(LDLIBS) $(if $(CU_OBJ),$(CUDART) -ldl -lrt -lstdc++)

ctest: $(C_TESTS) ## the C tests alone; CTESTS='list sample' for some
	@for t in $(C_TESTS); do echo "== $$t"; $$t || exit 1; done

test: all ## everything a change must pass, from the fixtures in the tree (ten minutes on two cores)
	@$(PYTHON) scripts/python_env.py installed test || $(PIP) --editable '.[test]'
	@$(MAKE) --no-print-directory $(JOBS) ctest
	$(PYTEST) tests

test-full: all ## the same and the full golden sets: BW24_GOLDENS=DIR make test-full
	@$(PYTHON) scripts/python_env.py installed test || $(PIP) --editable '.[test]'
	@test -d "$(BW24_GOLDENS)" || { echo "test-full needs BW24_GOLDENS=DIR, the folder of the golden sets" >&2; exit 2; }
	@$(MAKE) --no-print-directory $(JOBS) ctest
	BW24_GOLDENS="$(abspath $(BW24_GOLDENS))" $(PYTEST) tests

test-faults: all ## builds with seeded faults against the gates that must see them (a quarter of an hour)
	$(PYTEST) tests/test_faults.py --faults -s

soak: all ## long runs: fuzzing, every gate on the real model, load and broken requests on the server
	$(PYTHON) -m bw24 gate --full
	$(PYTHON) tests/fuzz_gguf.py --seconds $(or $(SECONDS_TO_RUN),3600)
	$(PYTHON) tests/fuzz_safetensors.py --seconds $(or $(SECONDS_TO_RUN),60)
	$(PYTHON) tests/load_server.py smollm2 --seconds $(or $(SECONDS_TO_RUN),600)
	$(PYTHON) tests/fuzz_server.py smollm2 --seconds $(or $(SECONDS_TO_RUN),600)

check: all ## every kernel against the reference, then the exactness gates on the default model
	$(PYTHON) -m bw24 kernel-check
	$(PYTHON) -m bw24 gate

fuzz: all ## a minute of broken model files
	$(PYTHON) tests/fuzz_gguf.py --seconds $(or $(SECONDS_TO_RUN),60)
	$(PYTHON) tests/fuzz_safetensors.py --seconds $(or $(SECONDS_TO_RUN),10)

ASAN := $(shell $(CC) -print-file-name=libasan.so):$(shell $(CC) -print-file-name=libubsan.so)
sanitize: all ## the C tests, then whole models from Python, under the address and undefined-behaviour sanitizers
	@$(PYTHON) scripts/python_env.py installed test || $(PIP) --editable '.[test]'
	@$(MAKE) --no-print-directory $(JOBS) SAN=1 CUDA=0 ctest lib
	LD_PRELOAD=$(ASAN) ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=8 BW24_LIBRARY=build/san/libbw24.so $(PYTEST) $(SANITIZED)

lint: ## ruff, and the limits on the length of files and functions
	@$(PYTHON) -m ruff --version >/dev/null 2>&1 || $(PIP) 'ruff>=0.5'
	$(PYTHON) -m ruff check .
	$(PYTHON) scripts/limits.py
	$(PYTHON) scripts/docs.py --check
	$(PYTHON) scripts/boards.py --check

cuda-objects: $(CU_OBJ) ## compile the CUDA code without linking or running it
	@echo "$(words $(CU_OBJ)) CUDA objects for $(or $(CUARCH),no architecture: no nvcc or no .cu file)"

ALL_CARDS := 80 86 89 90a 100 120a
release-cuda: ## the library with code for every card from sm_80 to sm_120a, in build/release (its objects are kept; first time: eleven minutes of one core)
	@$(MAKE) --no-print-directory $(JOBS) lib CUDA=1 CUARCH="$(ALL_CARDS)" BUILD=build/release SO=build/release/libbw24.so
	@size=$$(stat -c %s build/release/libbw24.so); echo "build/release/libbw24.so: $$size bytes, code for $(ALL_CARDS)"; \
	    test $$size -le 100000000 || { echo "the library exceeds 100 MB" >&2; exit 1; }

wheel: lib ## a wheel with the library and the demo model inside, in dist/, tagged by what the library needs
	$(PYTHON) -m pip wheel --no-deps -w dist . --config-settings=--build-option=--plat-name=$$($(PYTHON) scripts/wheel_tag.py $(SO))

release: lib ## wheel, source archive, checksums and notes in dist/, tried out (docs/RELEASING.md)
	PYTHON=$(PYTHON) scripts/release.sh

release-all: release-cuda ## the same with code for every card in the wheel
	cp build/release/libbw24.so py/bw24/libbw24.so
	cp libbw24/bw24.h py/bw24/bw24.h
	PYTHON=$(PYTHON) scripts/release.sh

clean: ## remove what was built
	rm -rf build dist py/bw24/libbw24.so py/bw24/bw24.h py/*.egg-info

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14
	@echo "variables: PYTHON CC BUILD CUDA=0|1 CUARCH='90a 120a' BW24_NVCC SAN=1 FAULT=n V=1"

-include $(OBJ:.o=.d) $(C_TESTS:%=%.d) $(CU_OBJ:.o=.d)
