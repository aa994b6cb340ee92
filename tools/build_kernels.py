"""Build ahead of time the FlashInfer modules that a model shape needs, into a folder for a machine without network.

    python tools/build_kernels.py --heads 32 --kv-heads 8 --head-dim 128 --num-draft 0 3 5 --out out/kernels
    PYTHONPATH=out/kernels graphspec generate ...      # on the other machine

The folder holds a package `flashinfer_jit_cache`, the name under which FlashInfer itself looks for modules built ahead
of time, before it compiles anything. The modules fit the FlashInfer version that built them and no other. `--wheels`
adds the wheels of FlashInfer and tvm-ffi. Needs nvcc and ninja, no GPU: an FA2 module takes minutes, an XQA module half
a minute of one core.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_CARRY_BYTES = 40 << 20
PACKAGE = '''"""FlashInfer modules built by graphspec's tools/build_kernels.py for {arch}."""

from pathlib import Path

__version__ = "{version}"


def get_jit_cache_dir() -> str:
    return str(Path(__file__).parent)
'''
# What modules link against where no driver is installed: defines what they use, so that libcuda.so.1 is recorded.
DRIVER_STUB = "void cuTensorMapEncodeTiled(void) {}\nvoid cuGetErrorName(void) {}\nvoid cuGetErrorString(void) {}\n"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, required=True, help="query heads")
    parser.add_argument("--kv-heads", type=int, required=True)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--num-draft", type=int, nargs="+", default=[0, 3], metavar="K")
    parser.add_argument("--window", action="store_true", help="modules for sliding windows too")
    parser.add_argument("--softcap", action="store_true", help="modules for soft caps too")
    parser.add_argument("--kinds", nargs="+", choices=("xqa", "fa2"), default=["xqa", "fa2"])
    parser.add_argument("--arch", default="9.0a", help="FLASHINFER_CUDA_ARCH_LIST")
    parser.add_argument("--jobs", type=int, default=1, help="compiler processes at once")
    parser.add_argument("--out", type=Path, default=Path("out/kernels"))
    parser.add_argument("--wheels", action="store_true", help="download the wheels of FlashInfer and tvm-ffi as well")
    return parser.parse_args(arguments)


def specs(args: argparse.Namespace) -> Iterator[Any]:
    """FlashInfer's build recipes. Import flashinfer only after `set_environment`: it reads the environment."""
    import torch
    from flashinfer.jit.attention import gen_batch_prefill_module
    from flashinfer.jit.xqa import gen_xqa_module

    half, windows = torch.bfloat16, (False, True) if args.window else (False,)
    for window in windows:
        if "xqa" in args.kinds:
            for query_len in sorted({1 + k for k in args.num_draft}):
                group = args.heads // args.kv_heads
                yield gen_xqa_module(half, half, args.page_size, args.head_dim, group, window, half, query_len)
        if "fa2" in args.kinds:
            for softcap in (False, True) if args.softcap else (False,):
                dims, encoding, half_reduction = (args.head_dim, args.head_dim), 0, False
                yield gen_batch_prefill_module(
                    "fa2", half, half, half, torch.int32, *dims, encoding, window, softcap, half_reduction
                )


def set_environment(args: argparse.Namespace, work: Path) -> None:
    """Tell FlashInfer's build where to work, what for, and where to find CUDA and a driver to link against."""
    if shutil.which("nvcc") is None:
        raise SystemExit("build_kernels needs nvcc: install the CUDA toolkit and put its bin folder on PATH")
    os.environ.setdefault("CUDA_HOME", cuda_home())
    os.environ.update(
        FLASHINFER_CUDA_ARCH_LIST=args.arch,
        FLASHINFER_WORKSPACE_BASE=str(work),
        FLASHINFER_EXTRA_LDFLAGS=f"-L{work}",
        MAX_JOBS=str(args.jobs),
    )
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)
    source = work / "driver.c"
    source.write_text(DRIVER_STUB)
    stub = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(work / "libcuda.so")]
    subprocess.run(stub, check=True)


def cuda_home() -> str:
    """Where nvcc says it lives; what is on PATH may be a wrapper."""
    asked = subprocess.run(
        ["nvcc", "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=True
    )
    found = re.search(r"^#\$ TOP=(.*)$", asked.stderr, re.MULTILINE)
    if found is None:
        raise SystemExit("cannot find the CUDA toolkit of nvcc: set CUDA_HOME")
    return os.path.normpath(found[1])


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    package, work = args.out / "flashinfer_jit_cache", args.out.resolve() / "work"
    for folder in (package, work):
        folder.mkdir(parents=True, exist_ok=True)
    set_environment(args, work)
    import flashinfer

    for spec in specs(args):
        target = package / spec.name / f"{spec.name}.so"
        started = time.perf_counter()
        if not target.exists():
            spec.build()
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(spec.get_library_path(), target)
        print(f"{time.perf_counter() - started:6.1f} s  {target.stat().st_size:>9,} bytes  {spec.name}", flush=True)
    (package / "__init__.py").write_text(PACKAGE.format(arch=args.arch, version=flashinfer.__version__))
    if args.wheels:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(args.out / "wheels")]
        subprocess.run([*pip, f"flashinfer-python=={flashinfer.__version__}", "apache-tvm-ffi"], check=True)
    carried = [path for path in args.out.rglob("*") if path.is_file() and work not in path.resolve().parents]
    total = sum(path.stat().st_size for path in carried)
    print(f"{args.out}: {total / 1e6:.1f} MB to carry, without {work.name}/", flush=True)
    if total > MAX_CARRY_BYTES:
        raise SystemExit(f"the carry is larger than {MAX_CARRY_BYTES >> 20} MiB: build fewer kinds or another version")


if __name__ == "__main__":
    main()
