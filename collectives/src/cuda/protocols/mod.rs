//! Models of the protocols that kernels of several devices have among themselves, in which every interleaving is tried.
//!
//! A model has the loads, stores and fences of kernels for some ranks and calls in a row, and memory as PTX promises it.
//! `kernel_text` holds the models against the kernels that they are made of. Threads of one block are one thread here.
//!
//! | file | holds |
//! | --- | --- |
//! | `memory` | which stores a load may see |
//! | `search` | models, and the search through their interleavings |
//! | `calls` | epochs, descriptions, and the leader block of a call |
//! | `handshake` | calls without data, and the state that the blocks of a rank share |
//! | `inboxes` | the LL and the LL128 protocol |
//! | `lamport` | the Lamport protocol, whose inbox has three parts |
//! | `escaped` | the Lamport protocol with escapes |
//! | `windows` | memory that peers access behind handshakes and flags |
//! | `expiry` | flags and escape marks that go before epochs repeat |
//! | `growth` | a second area of memory, which a communicator gets while its kernels run |
//! | `grant` | the lock of a device's SMs, which several communicators share |
//! | `kernel_text` | the lines of kernels that the models are made of |

mod calls;
mod escaped;
mod expiry;
mod grant;
mod growth;
mod handshake;
mod inboxes;
mod kernel_text;
mod lamport;
mod memory;
mod search;
mod windows;
