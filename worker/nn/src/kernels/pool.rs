//! The calling thread as one of its own compute threads.
//!
//! Every operation on several threads ends with its caller waiting for them. A caller from outside rayon's
//! pool sleeps through that: two changes of thread per operation, some thousand operations per training step,
//! and one thread more than there are cores. [`join`] makes the caller thread 0 of a pool of its own, so that
//! it takes part in what it asks for and only the others are woken. The pool's size is `RAYON_NUM_THREADS`,
//! or the number of cores.
//!
//! A pool belongs to one thread and ends with it: trainers that share a process (in tests) do not wait for
//! each other.
//!
//! What it does not do: change any result. Work is cut by its shape alone.

use std::cell::OnceCell;

use rayon::{ThreadPool, ThreadPoolBuilder};

thread_local! {
    static POOL: OnceCell<Option<ThreadPool>> = const { OnceCell::new() };
}

/// From now on this thread computes with a pool that it is part of. The second call, and a call from a thread
/// of another pool, change nothing. Returns the number of threads that compute.
pub fn join() -> usize {
    POOL.with(|pool| {
        pool.get_or_init(|| match ThreadPoolBuilder::new().use_current_thread().build() {
            Ok(pool) => Some(pool),
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread pool; using the process-wide pool, which is slower");
                None
            }
        });
    });
    rayon::current_num_threads()
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn a_thread_that_joined_takes_part_and_may_join_again() {
        let body = || {
            let threads = join();
            assert_eq!((rayon::current_thread_index(), join()), (Some(0), threads));
            let sum: u64 = (0..1000u64).into_par_iter().sum();
            assert_eq!(sum, 499_500);
        };
        let threads = [std::thread::spawn(body), std::thread::spawn(body)];
        threads.into_iter().for_each(|thread| thread.join().expect("neither waits for the other's pool"));
        assert_eq!(rayon::current_thread_index(), None);
    }
}
