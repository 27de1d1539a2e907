//! How ranks are linked.
