#!/bin/sh
# Installing a server does not start it.
exit 101
