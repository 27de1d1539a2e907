//! The device API: what a kernel of a collective needs. docs/kernels.md teaches it, and README.md here lists its headers.
//! Defines: WORLD, the number of ranks. Kernels that reduce also have DTYPE and OP, the codes of the call's type and
//! operation (`symmpool/impl/types.cuh`, `symmpool/reduce.cuh`).
//!
//! A kernel must have two parameters, `const __grid_constant__ DeviceComm` and `const __grid_constant__ DeviceCall`, and
//! must make a `Collective` of them first. Blocks are numbered without the first one of the grid, the leader block: it does
//! the handshake, in which ranks compare the descriptions of their calls. Blocks of equal number on all ranks are peer
//! blocks: signals are between them.
//!
//! Programs can ask for the version of this interface by SYMMPOOL_DEVICE_API. What stands below `symmpool/impl` may change.

#pragma once

#define SYMMPOOL_DEVICE_API 1

#include <symmpool/collective.cuh>
#include <symmpool/lamport_channel.cuh>
#include <symmpool/ll128_channel.cuh>
#include <symmpool/ll_channel.cuh>
#include <symmpool/memory_channel.cuh>
#include <symmpool/reduce.cuh>
#include <symmpool/span.cuh>
#include <symmpool/vector_loops.cuh>
