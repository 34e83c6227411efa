# Stands in for the prom/prometheus image.
FROM fencepost-test/debian
RUN install-packages prometheus && mkdir -p /prometheus && chown nobody /prometheus
VOLUME /prometheus
USER nobody
ENTRYPOINT ["/usr/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
