//! What ends a communicator: an abort, a lost rank, ranks in different collectives. No rank may hang, and
//! everybody is told.

use std::sync::atomic::Ordering;

use super::{Violation, hold};
use crate::collective::{BufMut, Collective, CollectiveError, Reduce};

type CheckResult = Result<bool, Violation>;
type Step = fn(&mut dyn Collective) -> Result<(), CollectiveError>;

/// Rank 0 never joins the second collective: the others can only leave it through the abort, or because rank
/// 0 left.
pub(super) fn abort(comm: &mut dyn Collective) -> CheckResult {
    comm.barrier()?;
    let (handle, progress) = (comm.abort_handle(), comm.progress());
    let outcome = if comm.rank().0 == 0 {
        handle.abort("test");
        comm.barrier()
    } else {
        let second = progress.entered.load(Ordering::Relaxed) + 1;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while progress.entered.load(Ordering::Relaxed) < second {
                    std::thread::yield_now();
                }
                handle.abort("test");
            });
            comm.all_reduce(BufMut::F32(&mut vec![1.0; 1 << 20]), Reduce::Sum)
        })
    };
    let ended = match &outcome {
        Err(CollectiveError::Aborted { reason, .. }) => reason.contains("test"),
        Err(CollectiveError::PeerLost { .. }) => true,
        _ => false,
    };
    hold!(ended, "the collective in flight ended as {outcome:?}");
    hold!(comm.barrier().is_err(), "a communicator that was aborted works again");
    Ok(true)
}

pub(super) fn lost_in_small(comm: &mut dyn Collective) -> CheckResult {
    lost(comm, 4)
}

pub(super) fn lost_in_large(comm: &mut dyn Collective) -> CheckResult {
    lost(comm, 1 << 21)
}

/// Rank 0 leaves after a barrier.
fn lost(comm: &mut dyn Collective, len: usize) -> CheckResult {
    comm.barrier()?;
    if comm.rank().0 == 0 {
        return Ok(false);
    }
    let outcome = comm.all_reduce(BufMut::F32(&mut vec![1.0; len]), Reduce::Sum);
    hold!(matches!(outcome, Err(CollectiveError::PeerLost { .. })), "the collective ended as {outcome:?}");
    hold!(comm.barrier().is_err(), "a communicator that lost a rank works again");
    Ok(true)
}

pub(super) fn barrier_against_sum(comm: &mut dyn Collective) -> CheckResult {
    against_sum(comm, |comm| comm.barrier())
}

pub(super) fn maximum_against_sum(comm: &mut dyn Collective) -> CheckResult {
    against_sum(comm, |comm| comm.all_reduce(BufMut::F32(&mut [0.0; 8]), Reduce::Max))
}

pub(super) fn longer_against_sum(comm: &mut dyn Collective) -> CheckResult {
    against_sum(comm, |comm| comm.all_reduce(BufMut::F32(&mut [0.0; 9]), Reduce::Sum))
}

pub(super) fn doubles_against_sum(comm: &mut dyn Collective) -> CheckResult {
    against_sum(comm, |comm| comm.all_reduce(BufMut::F64(&mut [0.0; 8]), Reduce::Sum))
}

pub(super) fn large_against_sum(comm: &mut dyn Collective) -> CheckResult {
    against_sum(comm, |comm| comm.all_reduce(BufMut::F32(&mut vec![0.0; 1 << 20]), Reduce::Sum))
}

/// Rank 0 shifts farther than the others. Those to whom no wrong header comes may get what they wait for.
pub(super) fn farther_against_near(comm: &mut dyn Collective) -> CheckResult {
    let distance = if comm.rank().0 == 0 { 2 } else { 1 };
    let outcome = comm.shift_in_place(BufMut::F32(&mut [0.0; 8]), distance);
    Ok(matches!(outcome, Err(CollectiveError::Mismatch { .. })))
}

/// Rank 0 does something else than the sum of eight numbers that everybody else is in. All fail; one at least
/// is told why.
fn against_sum(comm: &mut dyn Collective, other: Step) -> CheckResult {
    let outcome = match comm.rank().0 {
        0 => other(comm),
        _ => comm.all_reduce(BufMut::F32(&mut [0.0; 8]), Reduce::Sum),
    };
    hold!(outcome.is_err(), "a collective that other ranks did not enter succeeded");
    Ok(matches!(outcome, Err(CollectiveError::Mismatch { .. })))
}
