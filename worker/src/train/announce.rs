//! What a run says about itself before its first step: what is frozen, what trains, and what that costs.

use coxswain_proto::{
    human,
    run_spec::{Offload, Recompute, RunSpec},
    vla_flow::ActivationsDtype,
};

use super::{TrainError, run::Training};
use coxswain_nn::kernels::Tape;
use coxswain_tasks::vla_flow::policy::ModuleRow;
use crate::{collective::Computes, link::{Report, Start, StateSource}};

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Rank 0 describes the run in the coordinator's log.
    pub(super) fn announce(&mut self, start: &Start) -> Result<(), TrainError> {
        // A worker that joins a run under way has nothing new to say.
        let begins = matches!(start.source, StateSource::Fresh | StateSource::Checkpoint);
        if self.rank().0 != 0 || !begins {
            return Ok(());
        }
        let mut lines: Vec<String> = Vec::new();
        let rows =
            self.policy.trainable_report(self.trainables.layout(), self.spec.vla().model.weights_dtype);
        lines.extend(rows.iter().map(describe));
        let held = self.held.as_ref().expect("a generation begins with a state");
        let bytes = held.optimizer.bytes(self.comm.as_ref());
        lines.push(format!(
            "optimizer shard {} a rank, {} without partition; gradients {}, buffers of collectives {}",
            human::bytes(bytes.moments.0),
            human::bytes(bytes.moments_unpartitioned.0),
            human::bytes(bytes.grads.0),
            human::bytes(bytes.comm_buffers.0)
        ));
        if self.computes == Computes::OnCard {
            lines.push(
                "kernels are compiled and products tuned when they are first used: a first launch can stand still for minutes before its \
                 first step"
                    .into(),
            );
        }
        lines.extend(activations(self.spec));
        if self.spec.memory.offload == Offload::Optimizer {
            lines.push(match self.computes {
                Computes::OnCard => "memory.offload: optimizer: moments and mirror are in host memory between steps; every step brings them to the card and back".into(),
                Computes::OnCpu | Computes::OnCpuForWantOfCard => {
                    "memory.offload: optimizer asks for what a CPU does anyhow: moments and master weights are in host memory".into()
                }
            });
        }
        if bytes.redundancy.0 > 0 {
            lines.push(format!(
                "mirror of the neighbour's shard {} a rank: losing one worker loses no step (faults.mirror)",
                human::bytes(bytes.redundancy.0)
            ));
        }
        if let Some(features) = &self.features {
            lines.extend(self.policy.describe_tap().into_iter().flatten());
            lines.push(features.words_of_store());
        }
        lines.push(format!("a checkpoint takes {} on disk", human::bytes(self.checkpoint_bytes().0)));
        if self.next.0 > 0 {
            lines.push(format!("resumed from the checkpoint of step {}", self.next));
        }
        lines.into_iter().try_for_each(|line| self.link.report(Report::Note(line)))?;
        Ok(())
    }
}

/// What becomes of activations, where it is not the default.
pub(super) fn activations(spec: &RunSpec) -> Option<String> {
    let kept = match (spec.vla().model.activations_dtype, spec.train.recompute) {
        (ActivationsDtype::Float32, _) => return None,
        (ActivationsDtype::Bfloat16, Recompute::None) => {
            "nothing is saved: with train.recompute: none graphs are kept, in float32"
        }
        (ActivationsDtype::Bfloat16, _) => "what recompute keeps takes 2 bytes a value",
    };
    Some(format!("activations are rounded to bfloat16 between blocks; {kept}"))
}

/// One row of the table of what is frozen and what trains.
pub(super) fn describe(row: &ModuleRow) -> String {
    format!(
        "{:<18} {} {:>5} tensors {:>13} parameters {:>9} {:>10}",
        row.module,
        if row.trains { "trains" } else { "frozen" },
        row.tensors,
        human::grouped(row.parameters as u64),
        row.dtype,
        human::bytes(row.bytes)
    )
}
