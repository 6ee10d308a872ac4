#!/usr/bin/env bash
# isa_symbols.sh ISA LIBRARY: no function compiled for an instruction set may be a weak symbol that
# plain code could define too. The linker keeps one of them, and on an older processor the program
# would stop at an illegal instruction. A name that holds winnow::cpu::ISA cannot be meant by plain
# code.
set -euo pipefail
own="winnow::cpu::$1"
symbols=$(nm -C --defined-only "$2")
if ! grep -q "$own" <<<"$symbols"; then
  echo "$2 holds no symbol of $own: is it the library of $1?" >&2
  exit 1
fi
# DW.ref.*: a pointer to the exception handler of the language, no code.
leaks=$(awk '$2 ~ /^[WVu]$/' <<<"$symbols" | grep -v -e "$own" -e ' DW\.ref\.' || true)
if [[ -n $leaks ]]; then
  echo "Compiled for $1, and open to be picked by the linker for plain code:" >&2
  echo "$leaks" >&2
  exit 1
fi
