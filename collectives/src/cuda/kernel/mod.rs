//! Kernels: what they are compiled for, how they are loaded, and how much of a device they get.
//!
//! | file | holds |
//! | --- | --- |
//! | `mode` | what a kernel is compiled to do, where its file can do several things |
//! | `spec` | what a kernel is compiled for |
//! | `generated_kernel` | kernels whose sources are no files of ours |
//! | `native_compile` | kernels of programs, compiled for devices that need not be there |
//! | `modules` | compiled kernels, loaded once for all communicators of the process on a device |
//! | `sm_budget` | how much of a device a communicator's kernels may occupy |
//! | `loaded_kernel` | a kernel that is loaded, with what it may occupy |
//! | `kernels` | the kernels of one communicator, and their launch |
//! | `reduction_call` | a call of a reduction whose arguments were checked |
//! | `launcher` | the part of an engine that the launch of an algorithm's row is given |
//! | `launch_config` | how many blocks of how many threads a kernel gets |

pub(in crate::cuda) mod generated_kernel;
pub(in crate::cuda) mod kernels;
pub(in crate::cuda) mod launch_config;
pub(in crate::cuda) mod launcher;
pub(in crate::cuda) mod loaded_kernel;
pub(in crate::cuda) mod mode;
pub(in crate::cuda) mod modules;
pub(in crate::cuda) mod native_compile;
pub(in crate::cuda) mod reduction_call;
pub(in crate::cuda) mod sm_budget;
pub(in crate::cuda) mod spec;
