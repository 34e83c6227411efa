# Stands in for the official rabbitmq image.
FROM fencepost-test/debian
RUN install-packages rabbitmq-server && rm -rf /var/lib/rabbitmq/.erlang.cookie
ENV RABBITMQ_LOGS=- HOME=/var/lib/rabbitmq LANG=C.UTF-8 LC_ALL=C.UTF-8
COPY rabbitmq-entrypoint.sh /usr/local/bin/docker-entrypoint.sh
VOLUME /var/lib/rabbitmq
ENTRYPOINT ["docker-entrypoint.sh"]
EXPOSE 5672
CMD ["rabbitmq-server"]
