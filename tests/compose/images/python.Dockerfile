# Stands in for the official python image.
FROM fencepost-test/debian
RUN install-packages python3
CMD ["python3"]
