//! Which edges of the program an input goes through, where it was built to count them: LLVM's 8-bit counters,
//! one for each edge of the control flow, which `long --guided` switches on. Elsewhere there are none.

use std::{
    ptr,
    sync::atomic::{AtomicPtr, Ordering::Relaxed},
};

/// The program's counters lie in one piece of memory, from here to there.
static BEGIN: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static END: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

/// Called by each instrumented part of the program before `main`, each time with the same two places.
#[unsafe(no_mangle)]
extern "C" fn __sanitizer_cov_8bit_counters_init(begin: *mut u8, end: *mut u8) {
    BEGIN.store(begin, Relaxed);
    END.store(end, Relaxed);
}

/// What was reached so far.
pub(crate) struct Coverage {
    /// As they were after the last input.
    counts: Vec<u8>,
    /// Classes of counts that each edge was met with, a bit for each.
    met: Vec<u8>,
}

/// What an input reached that none before it did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Novelty {
    pub(crate) edges: usize,
    /// Edges that were gone through before, but less or more often.
    pub(crate) counts: usize,
}

impl Coverage {
    /// None where nothing counts.
    pub(crate) fn of_this_program() -> Option<Self> {
        let edges = END.load(Relaxed) as usize - BEGIN.load(Relaxed) as usize;
        (edges > 0).then(|| Self::of(edges))
    }

    fn of(edges: usize) -> Self {
        Self { counts: vec![0; edges], met: vec![0; edges] }
    }

    /// Sets the counters to zero.
    pub(crate) fn begin(&self) {
        // SAFETY: the linker has reserved these bytes for the counters, for as long as the program runs. No
        // reference to them exists: what else writes them is machine code that the compiler adds, which may
        // at worst lose a count to this, or this one to it.
        unsafe { ptr::write_bytes(BEGIN.load(Relaxed), 0, self.counts.len()) }
    }

    /// Takes down what was gone through since [`Coverage::begin`].
    pub(crate) fn look(&mut self) -> Novelty {
        // SAFETY: as in `begin`; `counts` is as long as the counters are, and is no part of them.
        unsafe { ptr::copy_nonoverlapping(BEGIN.load(Relaxed), self.counts.as_mut_ptr(), self.counts.len()) }
        self.compare()
    }

    fn compare(&mut self) -> Novelty {
        let mut novelty = Novelty { edges: 0, counts: 0 };
        for (counts, met) in self.counts.chunks(64).zip(self.met.chunks_mut(64)) {
            // Nearly all of a program is not gone through.
            if counts.iter().fold(0, |any, count| any | count) == 0 {
                continue;
            }
            for (count, met) in counts.iter().zip(met) {
                let class = class(*count);
                if class & !*met != 0 {
                    novelty.edges += usize::from(*met == 0);
                    novelty.counts += usize::from(*met != 0);
                    *met |= class;
                }
            }
        }
        novelty
    }

    pub(crate) fn edges(&self) -> usize {
        self.met.iter().filter(|met| **met != 0).count()
    }
}

/// A bit for counts that are about the same.
fn class(count: u8) -> u8 {
    match count {
        0 => 0,
        1..=3 => 1 << (count - 1),
        4..=7 => 1 << 3,
        8..=15 => 1 << 4,
        16..=31 => 1 << 5,
        32..=127 => 1 << 6,
        128.. => 1 << 7,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_is_new_once_and_again_where_it_is_gone_through_far_more_often() {
        let mut coverage = Coverage::of(200);
        let mut count = |edge: usize, count: u8| {
            coverage.counts.fill(0);
            coverage.counts[edge] = count;
            let Novelty { edges, counts } = coverage.compare();
            (edges, counts)
        };
        assert_eq!(count(70, 1), (1, 0));
        assert_eq!(count(70, 1), (0, 0));
        assert_eq!(count(70, 9), (0, 1));
        assert_eq!(count(70, 12), (0, 0));
        assert_eq!(count(199, 255), (1, 0));
        assert_eq!(coverage.edges(), 2);
    }
}
