//! What a run says about itself before its first step: what is frozen, what trains, and what that costs.

use coxswain_proto::{
    human,
    run_spec::{Offload, Shard},
};

use super::{doubts::warnings, validation::ValidationState};
use crate::train::{TrainError, Workbench, write_spec};
use crate::{
    collective::Computes,
    link::{Report, Start, StateSource},
    zero::Rates,
};
use coxswain_nn::kernels::Tape;
use coxswain_task::Module;

impl ValidationState {
    /// Rank 0 describes the run in the coordinator's log, once; and leaves its specification.
    pub fn announce<B: Tape<Base = B>>(
        &mut self,
        bench: &mut Workbench<'_, B>,
        start: &Start,
    ) -> Result<(), TrainError> {
        if std::mem::replace(&mut self.announced, true) || bench.members.rank().0 != 0 {
            return Ok(());
        }
        write_spec(&bench.run)?;
        // A worker that joins a run under way has nothing new to say.
        let begins = matches!(start.source, StateSource::Fresh | StateSource::Checkpoint);
        if !begins {
            return Ok(());
        }
        let mut lines: Vec<String> = Vec::new();
        let rows = bench.learner.objective.modules(bench.learner.trainables.layout());
        lines.extend(rows.iter().map(describe));
        let bytes = bench.learner.optimizer().bytes(bench.members.comm.as_ref());
        lines.push(format!(
            "optimizer state {} a rank ({} unsharded); gradients {}, collective buffers {}",
            human::bytes(bytes.state.0),
            human::bytes(bytes.state_unpartitioned.0),
            human::bytes(bytes.grads.0),
            human::bytes(bytes.comm_buffers.0)
        ));
        if bench.members.computes == Computes::OnGpu {
            lines.push(
                "kernels are compiled and matmuls tuned at their first use: a first launch may take minutes before its first step"
                    .into(),
            );
        }
        lines.extend(bench.learner.objective.notes());
        let warnings = warnings(bench.run.spec, &*bench.feed.samples);
        lines.extend(warnings.into_iter().map(|what| format!("warning: {what}")));
        lines.extend(bench.run.starts.iter().cloned());
        lines.extend(offloaded(bench.run.spec.memory.offload, bench.members.computes).map(str::to_owned));
        if bench.run.spec.memory.shard == Shard::Frozen {
            lines.push(match bench.members.world() {
                1 => "memory.shard: frozen has no effect with one rank, which holds all blocks".to_owned(),
                world => format!(
                    "memory.shard: frozen: each of {world} ranks holds a part of every block, and two \
                     whole blocks at a time"
                ),
            });
        }
        if bytes.redundancy.0 > 0 {
            lines.push(format!(
                "each rank keeps a replica of another's shard ({}): losing one worker loses no step (faults.mirror)",
                human::bytes(bytes.redundancy.0)
            ));
        }
        if let Some(decay) = bench.run.spec.optimizer.ema_decay {
            lines.push(format!(
                "the optimizer shard includes an EMA of the weights (decay {decay}); its artifacts go to ema/"
            ));
        }
        if let Some(scale) = bench.learner.optimizer().loss_scale() {
            lines.push(format!(
                "the loss is scaled by {} in the next step; if a gradient overflows, the step is skipped and the scale is halved",
                scale.scale()
            ));
        }
        if let Some(features) = &bench.features {
            lines.extend(
                bench
                    .learner
                    .objective
                    .extractor()
                    .map(|extractor| extractor.describe())
                    .into_iter()
                    .flatten(),
            );
            lines.push(features.words_of_store());
        }
        lines
            .push(format!("a checkpoint takes {} on disk", human::bytes(bench.learner.checkpoint_bytes().0)));
        if bench.next.0 > 0 {
            lines.push(format!("resumed from the checkpoint of step {}", bench.next));
            lines.extend(replanned(bench));
        }
        lines.into_iter().try_for_each(|line| bench.members.link.report(Report::Note(line)))?;
        Ok(())
    }
}

/// What is not where the rank computes.
fn offloaded(offload: Offload, computes: Computes) -> Option<&'static str> {
    Some(match (offload, computes) {
        (Offload::None | Offload::Layers, _) => return None,
        (Offload::Optimizer, Computes::OnGpu) => {
            "memory.offload: optimizer: the optimizer's state and the replica are in host memory between steps; every step copies them to the GPU and back"
        }
        (Offload::Optimizer, _) => {
            "memory.offload: optimizer has no effect on a CPU: \
             the optimizer's state and master weights are in host memory"
        }
        (Offload::Embedding, Computes::OnGpu) => {
            "memory.offload: embedding: the table of token embeddings is in host memory; every step copies the rows that it needs to the GPU"
        }
        (Offload::Embedding, _) => {
            "memory.offload: embedding has no effect on a CPU: \
             the table of token embeddings is in host memory"
        }
    })
}

/// What becomes of the rates where the run was prolonged, or cut short.
fn replanned<B: Tape<Base = B>>(bench: &Workbench<'_, B>) -> Option<String> {
    let (now, before) = (bench.run.plan.total_steps(), bench.stats.planned_before?);
    let rates = bench.run.rates(&*bench.learner.objective, Rates::default(), before);
    // Groups differ in their warm-up, and in which steps they count: the first speaks for all.
    let group = bench.learner.trainables.layout().groups().first()?.to_string();
    let [was, is] =
        [&rates, &bench.learner.rates].map(|rates| 100.0 * rates.multiplier(bench.next.0, &group));
    let follows = match (was - is).abs() < 0.05 {
        true => "learning rates continue unchanged from this step".to_owned(),
        false => format!(
            "the learning-rate schedule now spans the new length: rates continue at {is:.1} % of their \
             peaks instead of {was:.1} %"
        ),
    };
    (now != before).then(|| format!("the run's length changed from {before} to {now} steps; {follows}"))
}

/// One row of the table of what is frozen and what trains.
pub(in crate::train) fn describe(row: &Module) -> String {
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
