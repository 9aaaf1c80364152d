#!/usr/bin/env bash
# CUDA 12.4 beside whatever CUDA a system has: the toolkit of Debian 13 (non-free), unpacked into a folder of the usual form without being
# installed. PyPI's nvidia-cuda-nvcc-cu12 does not do: it has ptxas and libnvvm, but neither nvcc nor the front end (cudafe++, cicc).
#
# usage: cuda12.sh DIR    afterwards: CUDACXX=DIR/bin/nvcc cmake ...
set -euo pipefail
out=$(realpath -m "${1:?usage: cuda12.sh DIR}")
if [[ -x $out/bin/nvcc ]]; then exit 0; fi
command -v apt-get dpkg-deb >/dev/null || { echo "cuda12.sh: needs apt-get and dpkg-deb (Debian); elsewhere install CUDA 12.4 and set CUDACXX" >&2; exit 3; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
# Debian 13 from wherever this system takes its packages, in lists of its own.
mirror=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | grep -E '/debian/?$' | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:?no mirror of Debian is known to apt} trixie main non-free" >"$work/sources.list"
apt=(apt-get -q -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$work/lists"
  -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update >/dev/null
echo "CUDA 12.4: about 1 GB to fetch"
(cd "$work" && "${apt[@]}" download nvidia-cuda-toolkit nvidia-cuda-dev libcudart12 libcu++-dev >/dev/null)

for package in "$work"/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$work" --wildcards --no-wildcards-match-slash --exclude='*_static*.a' \
    ./usr/bin ./usr/include ./usr/lib/nvidia-cuda-toolkit/bin ./usr/lib/nvidia-cuda-toolkit/libdevice \
    './usr/lib/x86_64-linux-gnu/libcudart*' './usr/lib/x86_64-linux-gnu/libcudadevrt.a' 2>/dev/null || true
done
dpkg-deb --fsys-tarfile "$work"/nvidia-cuda-dev_*.deb | tar -x -C "$work" ./usr/lib/x86_64-linux-gnu/libcudart_static.a

rm -rf "$out"
mkdir -p "$out/bin" "$out/nvvm/bin" "$out/lib64"
cp "$work"/usr/bin/{cudafe++,fatbinary,nvlink,ptxas,cuobjdump} "$out/bin/"
cp -r "$work"/usr/lib/nvidia-cuda-toolkit/bin/crt "$out/bin/"
cp "$work"/usr/lib/nvidia-cuda-toolkit/bin/cicc "$out/nvvm/bin/"
cp -r "$work"/usr/lib/nvidia-cuda-toolkit/libdevice "$out/nvvm/"
cp -r "$work"/usr/include "$out/"
cp -L "$work"/usr/lib/x86_64-linux-gnu/{libcudart.so.12,libcudart_static.a,libcudadevrt.a} "$out/lib64/"
ln -s libcudart.so.12 "$out/lib64/libcudart.so"
cat >"$out/bin/nvcc.profile" <<'TEXT'
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
TEXT
cp "$work"/usr/lib/nvidia-cuda-toolkit/bin/nvcc "$out/bin/"  # last: a folder with nvcc is whole
"$out/bin/nvcc" --version | tail -n 2
