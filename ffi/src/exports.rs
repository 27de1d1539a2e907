//! The exported pairs of functions, one for each slot.
//!
//! torch takes plain function pointers for an allocator, so the function itself must imply which pool a call is for.
//! Names are fixed (`symmpool_alloc_7`), so that `torch.cuda.memory.CUDAPluggableAllocator` finds them in the library.

use std::ffi::{c_int, c_void};

use crate::guard::guarded;
use crate::on;
use crate::slots::{self, Slot};

/// `void *alloc(ssize_t size, int device, cudaStream_t stream)`
type AllocFunction = unsafe extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;
/// `void free(void *ptr, size_t size, int device, cudaStream_t stream)`
type FreeFunction = extern "C" fn(*mut c_void, usize, c_int, *mut c_void);

/// # Safety
///
/// You must pass NULL or a stream that lives as [`Stream::from_raw`](symmpool_allocator::Stream::from_raw) says.
unsafe fn alloc(slot: usize, size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    // SAFETY: the caller promised NULL or such a stream.
    let stream = unsafe { on(stream) };
    let work = || slots::alloc(slot, size, device, stream).map(|at| at as *mut c_void);
    guarded(work, |_| std::ptr::null_mut())
}

fn free(slot: usize, pointer: *mut c_void) {
    guarded(|| slots::free(slot, pointer as u64), |_| ());
}

impl Slot {
    /// The addresses of the slot's two functions.
    pub fn functions(&self) -> (usize, usize) {
        let (alloc, free) = FUNCTIONS[self.index()];
        (alloc as usize, free as usize)
    }
}

macro_rules! exports {
    ($($slot:literal)*) => {
        /// The functions of all slots, in order.
        static FUNCTIONS: [(AllocFunction, FreeFunction); slots::SLOTS] = [$({
            #[unsafe(export_name = concat!("symmpool_alloc_", $slot))]
            unsafe extern "C" fn alloc_here(
                size: isize,
                device: c_int,
                stream: *mut c_void,
            ) -> *mut c_void {
                // SAFETY: torch passes streams of its own, which live as long as the process, and other callers promise the
                // same of theirs.
                unsafe { alloc($slot, size, device, stream) }
            }
            #[unsafe(export_name = concat!("symmpool_free_", $slot))]
            extern "C" fn free_here(
                pointer: *mut c_void,
                _size: usize,
                _device: c_int,
                _stream: *mut c_void,
            ) {
                free($slot, pointer);
            }
            (alloc_here as AllocFunction, free_here as FreeFunction)
        }),*];
    };
}

exports! {
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
    16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
    32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47
    48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use symmpool_allocator::lane::LaneConfig;
    use symmpool_allocator::testing::in_child;
    use symmpool_allocator::{Driver, Error, Group, Pool, Stream};

    use super::*;
    use crate::guard::lock;
    use crate::slots::{SLOTS, bind, owner};

    /// The process has one table of slots, so tests run one at a time.
    static TURN: Mutex<()> = Mutex::new(());

    fn pool() -> Pool {
        let group = Group::in_process(1).unwrap().pop().unwrap();
        Pool::builder(group).driver(Driver::host().unwrap()).build().unwrap()
    }

    /// A pool with a lane that reuses memory at once, "mine".
    fn pool_with_a_local_lane() -> Pool {
        let group = Group::in_process(1).unwrap().pop().unwrap();
        let builder = Pool::builder(group).driver(Driver::host().unwrap());
        builder.lane(LaneConfig::local("mine")).build().unwrap()
    }

    fn stats(pool: &Pool) -> symmpool_allocator::lane::LaneStats {
        pool.default_lane().stats().unwrap()
    }

    fn call(slot: usize, size: isize) -> *mut c_void {
        // SAFETY: NULL is the default stream.
        unsafe { FUNCTIONS[slot].0(size, 0, std::ptr::null_mut()) }
    }

    fn give(slot: usize, pointer: *mut c_void) {
        FUNCTIONS[slot].1(pointer, 0, 0, std::ptr::null_mut());
    }

    #[test]
    fn blocks_come_from_the_lane_and_are_freed_without_order() {
        let _turn = lock(&TURN);
        let pool = pool();
        let slot = bind(&pool, &pool.default_lane()).unwrap();
        let n = slot.index();
        let (a, b) = (call(n, 1 << 20), call(n, 1));
        assert_eq!(b as u64 - a as u64, 1 << 20);
        assert!(pool.is_commit_due());
        // Frees come from another thread, in another order.
        let freed = (a as usize, b as usize);
        thread::spawn(move || {
            give(n, freed.1 as *mut c_void);
            give(n, freed.0 as *mut c_void);
        })
        .join()
        .unwrap();
        assert_eq!(slot.live(), 0);
        // D5: the memory is not reused before the next commit.
        assert_ne!(call(n, 1 << 20), a);
        pool.commit().unwrap();
        assert_eq!(stats(&pool).deferred, 0);
        assert_eq!(call(n, 1 << 20), a);
        assert!(slot.failure().is_none());
    }

    #[test]
    fn invalid_calls_are_errors_and_change_nothing() {
        let _turn = lock(&TURN);
        let pool = pool();
        let slot = bind(&pool, &pool.default_lane()).unwrap();
        let n = slot.index();
        assert!(call(n, -1).is_null());
        assert!(slot.take_failure().unwrap().is_invalid_argument());
        assert!(call(n, isize::MAX).is_null());
        assert!(slot.failure().unwrap().is_out_of_memory());
        let block = call(n, 100);
        give(n, std::ptr::null_mut());
        assert!(slot.take_failure().unwrap().is_out_of_memory(), "freeing NULL is no error");
        give(n, (block as usize + 512) as *mut c_void);
        assert!(slot.take_failure().unwrap().is_invalid_argument());
        give(n, block);
        give(n, block);
        let twice = slot.take_failure().unwrap();
        assert!(twice.is_invalid_argument() && twice.to_string().contains("freed before"));
        assert_eq!(stats(&pool).unordered_frees, 1);
    }

    #[test]
    fn a_slot_outlives_its_pool_until_the_last_block_is_freed() {
        let _turn = lock(&TURN);
        let pool = pool();
        let slot = bind(&pool, &pool.default_lane()).unwrap();
        let n = slot.index();
        let block = call(n, 4096).cast::<u8>();
        drop(slot);
        drop(pool);
        assert!(call(n, 1).is_null(), "closed to allocations");
        // SAFETY: the block has this length, and nothing else accesses it.
        unsafe { block.write_bytes(7, 4096) };
        // SAFETY: the block lives until `give` below, and has 4096 bytes, which were just written.
        assert_eq!(unsafe { block.wrapping_add(4095).read() }, 7);
        assert!(slots::pool(n).is_some());
        give(n, block.cast());
        assert!(slots::pool(n).is_none() && owner(block as u64).unwrap().is_none());
        give(n, block.cast());
    }

    #[test]
    fn slots_run_out_with_an_error_and_come_back() {
        let _turn = lock(&TURN);
        let pool = pool();
        let vacant = (0..SLOTS).filter(|slot| slots::pool(*slot).is_none()).count();
        let mut slots = Vec::new();
        let error = loop {
            match bind(&pool, &pool.default_lane()) {
                Ok(slot) => slots.push(slot),
                Err(error) => break error,
            }
        };
        assert!(error.is_invalid_state(), "{error}");
        assert_eq!(slots.len(), vacant);
        let freed = slots.swap_remove(7).index();
        assert_eq!(bind(&pool, &pool.default_lane()).unwrap().index(), freed);
    }

    #[test]
    fn memory_whose_use_could_not_be_recorded_is_not_reused() {
        let _turn = lock(&TURN);
        let pool = pool();
        let slot = bind(&pool, &pool.default_lane()).unwrap();
        let n = slot.index();
        let block = call(n, 4096);
        // A lane remembers 64 streams, of which the block's own is the first: 1 is another name for the default stream.
        // SAFETY: host memory has no streams, so none of these handles is used.
        let stream = |raw| unsafe { Stream::from_raw(raw) };
        let record = |raw| slots::record_stream(n, block as u64, stream(raw));
        assert!((1..65).all(|stream| record(stream).is_ok()));
        assert!(record(65).unwrap_err().is_invalid_argument());
        give(n, block);
        assert!(slot.take_failure().unwrap().is_invalid_state());
        assert_eq!((slot.live(), pool.commit().unwrap().blocks_returned), (0, 0));
        assert_ne!(call(n, 4096), block);
        assert!(slots::record_stream(n, 8, stream(1)).unwrap_err().is_invalid_argument());
        assert!(slots::is_on(n, 0) && slots::is_on(n, 5), "host memory serves any device");
    }

    /// Whether each call on slot `n` of the parent and on its block is answered in a forked child as it must be.
    fn a_child_is_answered(slot: &Slot, block: *mut c_void, own: &Pool) -> bool {
        let refused =
            |error: Error| error.is_invalid_state() && error.to_string().contains("forked from it");
        let (n, address) = (slot.index(), block as u64);
        let refusals = [
            slots::alloc(n, 1, 0, Stream::DEFAULT).map(drop),
            slots::free(n, address),
            slots::record_stream(n, address, Stream::numbered(1)),
        ];
        let others = [
            call(n, 1).is_null(),
            slot.failure().is_some_and(refused) && slot.take_failure().is_some_and(refused),
            slot.live() == 0 && slots::pool(n).is_none(),
            slots::is_on(n, 3),
            owner(address).map_or_else(refused, |found| found == Some(n)),
        ];
        give(n, block);
        // A slot of its own serves the child.
        let mine = bind(own, &own.lane("mine").unwrap()).unwrap();
        let served = mine.index() != n && slots::is_on(mine.index(), 0);
        refusals.into_iter().all(|refusal| refusal.is_err_and(refused))
            && others.into_iter().all(|good| good)
            && served
    }

    #[test]
    fn a_child_does_not_wait_for_the_lock_of_its_parents_slot() {
        let _turn = lock(&TURN);
        let pool = pool_with_a_local_lane();
        let lane = pool.lane("mine").unwrap();
        let slot = bind(&pool, &lane).unwrap();
        let n = slot.index();
        let block = call(n, 4096);
        let mut slot = Some(slot);
        let busy = AtomicBool::new(true);
        let answered = thread::scope(|scope| {
            // The slot's lock is held most of the time, and that of the next vacant slot now and then.
            for _ in 0..2 {
                scope.spawn(|| {
                    while busy.load(Ordering::Relaxed) {
                        for _ in 0..64 {
                            give(n, call(n, 512));
                        }
                        drop(bind(&pool, &lane));
                    }
                });
            }
            let children = (0..40).all(|_| {
                in_child(|| {
                    let good = a_child_is_answered(slot.as_ref().unwrap(), block, &pool);
                    drop(slot.take());
                    good
                })
            });
            busy.store(false, Ordering::Relaxed);
            children
        });
        assert!(answered);
        // Calls of the children did not change the parent's slot.
        let slot = slot.unwrap();
        give(n, block);
        assert_eq!((slot.live(), slot.take_failure().map(|error| error.to_string())), (0, None));
    }

    #[test]
    fn a_local_lane_reuses_at_once() {
        let _turn = lock(&TURN);
        let pool = pool_with_a_local_lane();
        let slot = bind(&pool, &pool.lane("mine").unwrap()).unwrap();
        let n = slot.index();
        let (a, b) = (call(n, 3000), call(n, 3000));
        give(n, a);
        assert_eq!(call(n, 3000), a);
        give(n, b);
        assert!(!pool.is_commit_due());
    }
}
