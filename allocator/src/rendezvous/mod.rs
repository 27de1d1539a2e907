//! Rendezvous.
