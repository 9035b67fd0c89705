#!/bin/sh
# Names the images that docker/ starts from by their digests of today, in docker/.env, which compose reads:
#     sh docker/pin.sh && cat docker/.env
# Commit the file: everybody then builds from the same bytes. Run it again for the registry's security updates.
set -eu
cd "$(dirname "$0")"
trap 'rm -f .env.new' EXIT
for line in PYTHON_IMAGE=python:3.11-slim-bookworm NGINX_IMAGE=nginx:1.28-alpine; do
    digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "${line#*=}")
    echo "$line@$digest"
done > .env.new
mv .env.new .env
