# Stands in for the official postgres image.
FROM fencepost-test/debian
RUN mkdir -p /etc/postgresql-common && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf \
    && install-packages postgresql && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/ \
    && mkdir -p /var/lib/postgresql/data /docker-entrypoint-initdb.d && chown postgres:postgres /var/lib/postgresql/data /var/run/postgresql
COPY postgres-entrypoint.sh /usr/local/bin/docker-entrypoint.sh
ENV PGDATA=/var/lib/postgresql/data
VOLUME /var/lib/postgresql/data
ENTRYPOINT ["docker-entrypoint.sh"]
STOPSIGNAL SIGINT
EXPOSE 5432
CMD ["postgres"]
