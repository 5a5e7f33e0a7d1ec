//! What a run says about itself before its first step: what is frozen, what trains, and what that costs.

use super::{TrainError, run::Training};
use crate::{kernels::Tape, link::Report};

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Rank 0 describes the run in the coordinator's log.
    pub(super) fn announce(&mut self) -> Result<(), TrainError> {
        if self.rank().0 != 0 {
            return Ok(());
        }
        let mut lines: Vec<String> = Vec::new();
        lines.extend(self.policy.trainable_report(self.trainables.layout()).iter().map(ToString::to_string));
        let bytes = self.optimizer.bytes(self.comm.as_ref());
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        lines.push(format!(
            "optimizer shard {:.1} MiB a rank, {:.1} without partition; gradients {:.1} MiB, ring buffers {:.1} MiB",
            mib(bytes.moments.0),
            mib(bytes.moments_unpartitioned.0),
            mib(bytes.grads.0),
            mib(bytes.comm_buffers.0)
        ));
        lines.push(format!("a checkpoint takes {:.1} MiB on disk", mib(self.checkpoint_bytes().0)));
        if self.next.0 > 0 {
            lines.push(format!("resumed from the checkpoint of step {}", self.next));
        }
        lines.into_iter().try_for_each(|line| self.link.report(Report::Note(line)))?;
        Ok(())
    }
}
