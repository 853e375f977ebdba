#!/bin/sh
# Install Google's edgetpu_compiler on x86-64 Debian or Ubuntu: sudo sh install.sh
#
# The compiler is closed and its last version is 16.0. It is installed from Google's apt archive, whose packages are
# checked with Google's key. The key is valid for this archive only (signed-by). DESTDIR is a root folder for tests.
set -eu

version=16.0
archive=https://packages.cloud.google.com/apt
keyring=/usr/share/keyrings/coral-edgetpu.gpg
source=/etc/apt/sources.list.d/coral-edgetpu.list

if [ "$(dpkg --print-architecture)" != amd64 ]; then
    echo "install.sh: the compiler exists for x86-64 (amd64) only; this system is $(dpkg --print-architecture)" >&2
    exit 1
fi

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends ca-certificates curl gnupg

key=$(mktemp)
trap 'rm -f "$key"' EXIT
curl --fail --silent --show-error --location --output "$key" "$archive/doc/apt-key.gpg"
mkdir -p "${DESTDIR:-}$(dirname "$keyring")" "${DESTDIR:-}$(dirname "$source")"
gpg --batch --yes --dearmor --output "${DESTDIR:-}$keyring" "$key"
chmod 644 "${DESTDIR:-}$keyring"
echo "deb [arch=amd64 signed-by=$keyring] $archive coral-edgetpu-stable main" > "${DESTDIR:-}$source"

apt-get update
apt-get install -y --no-install-recommends "edgetpu-compiler=$version"
edgetpu_compiler --version
