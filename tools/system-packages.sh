#!/usr/bin/env bash
# system-packages.sh COMMAND:PACKAGE…: makes sure that each COMMAND exists. As root on a Debian-like system it
# installs the PACKAGEs of those that do not; elsewhere it says what is missing, and what needs it is skipped.
set -euo pipefail

# Debian keeps nft in a directory that is not on everybody's PATH.
export PATH="$PATH:/usr/sbin:/sbin"

missing=()
for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
done
((${#missing[@]})) || exit 0

if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    echo "installing ${missing[*]} (apt-get)" >&2
    if apt-get update -qq >"$log" 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >>"$log" 2>&1; then
        exit 0
    fi
    tail -n 5 "$log" >&2
    echo "warning: apt-get could not install ${missing[*]}; what needs them is skipped and says so" >&2
else
    echo "warning: missing ${missing[*]} (Debian's names); what needs them is skipped and says so" >&2
fi
