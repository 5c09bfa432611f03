#!/usr/bin/env bash
# make-venv.sh VENV: a virtual environment in which the project is installed, ready for tests.
# Uses $PYTHON if set, else python3.11, else the newest python3 that is at least 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:?usage: make-venv.sh VENV}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Runs it, since a version manager's shim can exist without a version behind it.
usable() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        usable "$PYTHON" && echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.{20..12} python3; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

apt_install() {
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
    echo "installing $* (apt-get)" >&2
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } \
        >"$log" 2>&1 || { cat "$log" >&2; return 1; }
}

python=$(find_python)
if [[ -z $python ]] && [[ -z ${PYTHON:-} ]] && apt_install python3 python3-venv; then
    python=$(find_python)
fi
if [[ -z $python ]]; then
    echo "error: Python 3.11 or newer is needed, and ${PYTHON:-none of python3.11, python3.12, …, python3} is one." >&2
    echo "       Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3" >&2
    exit 1
fi

if [[ ! -x $venv/bin/python ]] || ! usable "$venv/bin/python"; then
    echo "creating $venv with $("$python" --version)" >&2
    rm -rf "$venv"
    # Debian splits what venv needs into a package of its own.
    if ! "$python" -m venv "$venv" >"$log" 2>&1; then
        rm -rf "$venv"
        apt_install python3-venv || { cat "$log" >&2; exit 1; }
        "$python" -m venv "$venv"
    fi
fi

echo "installing the project and its development tools into $venv (once)" >&2
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[server,dev]'
touch "$venv/.installed"
