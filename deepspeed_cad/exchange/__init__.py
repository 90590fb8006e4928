"""Transports: what carries an exchange between homes and servers, one file each, and the choice among them."""
