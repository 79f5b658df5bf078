#!/bin/sh
# Start the S3 gateway of SeaweedFS with the one identity whose keys are secrets: without a file of identities it would
# let everybody in.
set -eu

key=$(cat /run/secrets/s3_access_key)
secret=$(cat /run/secrets/s3_secret_key)
if [ -z "$key" ] || [ -z "$secret" ]; then
    echo "s3: a key is empty" >&2
    exit 1
fi
umask 077
cat > /run/starling/s3.json <<JSON
{"identities": [{
  "name": "starling",
  "credentials": [{"accessKey": "$key", "secretKey": "$secret"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]
}]}
JSON
unset key secret
exec /usr/bin/weed -logtostderr=true s3 -filer=seaweedfs:8888 -port=8333 -ip.bind=0.0.0.0 -config=/run/starling/s3.json
