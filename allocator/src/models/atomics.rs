//! Atomics that are std's outside of models, and loom's inside of one.

#![allow(missing_docs)] // methods are those of std

use std::sync::atomic::Ordering;

use super::is_running;

macro_rules! atomic {
    ($(#[$about:meta])* $name:ident, $value:ty) => {
        $(#[$about])*
        pub struct $name {
            plain: std::sync::atomic::$name,
            /// The atomic that loom watches, if this was made inside a model.
            watched: Option<loom::sync::atomic::$name>,
        }

        impl $name {
            /// An atomic of this value.
            /// An atomic of a static, which no model watches.
            pub const fn in_static(value: $value) -> Self {
                Self { plain: std::sync::atomic::$name::new(value), watched: None }
            }

            pub fn new(value: $value) -> Self {
                let watched = is_running().then(|| loom::sync::atomic::$name::new(value));
                Self { plain: std::sync::atomic::$name::new(value), watched }
            }

            pub fn load(&self, order: Ordering) -> $value {
                match &self.watched {
                    Some(watched) => watched.load(order),
                    None => self.plain.load(order),
                }
            }

            pub fn store(&self, value: $value, order: Ordering) {
                match &self.watched {
                    Some(watched) => watched.store(value, order),
                    None => self.plain.store(value, order),
                }
            }

            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                match &self.watched {
                    Some(watched) => watched.swap(value, order),
                    None => self.plain.swap(value, order),
                }
            }

            pub fn compare_exchange(
                &self,
                old: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                match &self.watched {
                    Some(watched) => watched.compare_exchange(old, new, success, failure),
                    None => self.plain.compare_exchange(old, new, success, failure),
                }
            }

            pub fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                change: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                match &self.watched {
                    Some(watched) => watched.fetch_update(success, failure, change),
                    None => self.plain.fetch_update(success, failure, change),
                }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(Default::default())
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.plain.fmt(f)
            }
        }
    };
}

macro_rules! number {
    ($name:ident, $value:ty) => {
        impl $name {
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                match &self.watched {
                    Some(watched) => watched.fetch_add(value, order),
                    None => self.plain.fetch_add(value, order),
                }
            }

            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                match &self.watched {
                    Some(watched) => watched.fetch_sub(value, order),
                    None => self.plain.fetch_sub(value, order),
                }
            }
        }
    };
}

atomic!(
    /// A flag.
    AtomicBool,
    bool
);
atomic!(
    /// A word of 32 bits.
    AtomicU32,
    u32
);
atomic!(
    /// A word of 64 bits.
    AtomicU64,
    u64
);
atomic!(
    /// A word as long as an address.
    AtomicUsize,
    usize
);
number!(AtomicU32, u32);
number!(AtomicU64, u64);
number!(AtomicUsize, usize);

pub fn fence(order: Ordering) {
    if is_running() {
        loom::sync::atomic::fence(order);
    } else {
        std::sync::atomic::fence(order);
    }
}
