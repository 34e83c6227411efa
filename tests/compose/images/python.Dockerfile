# Stands in for the official python image.
FROM fencepost-test/debian
RUN apt-get update && apt-get install -y --no-install-recommends python3-minimal python3 && rm -rf /var/lib/apt/lists/*
CMD ["python3"]
