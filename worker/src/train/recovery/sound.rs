//! A checkpoint that can be gone on from, though a newer one is damaged.
//!
//! Every rank reads what it needs of the newest checkpoint, compares it with the manifest, and votes. If a
//! rank has found damage, all go back to the newest one before it, the same on each, and vote again. Once one
//! is sound, the first rank sets the damaged ones aside. They are renamed and not removed: the rank's machine
//! may be to blame. Where the generation ends before it has begun, the next one is told to start from them
//! again: one that is set aside is damaged.
//!
//! What this does not do: look for damage in what no rank reads (the shards of a checkpoint are read by those
//! that hold a part of them), or go back beyond the oldest checkpoint. Without an older one the error ends
//! the rank, as any other does, and all checkpoints stay where they are: the next try finds the same, and
//! says the same.

use coxswain_proto::ids::{Bytes, Step};

use crate::{
    collective::{BufMut, Reduce},
    link::Report,
    train::{Results, TrainError, Workbench, results::checkpoint::DAMAGED},
};
use coxswain_nn::kernels::Tape;

/// Stands for "none" where a step is expected.
const NONE: f64 = -1.0;

/// Takes over the checkpoint of `newest`, or the newest before it that no rank finds damaged.
pub(super) fn restore<B: Tape<Base = B>>(
    results: &mut Results,
    bench: &mut Workbench<'_, B>,
    newest: Step,
) -> Result<Bytes, TrainError> {
    let (mut step, mut lost) = (newest, Vec::new());
    loop {
        let restored = results.restore(bench, step);
        let damage = match &restored {
            Err(TrainError::Checkpoint(error)) if error.is_damage() => Some(error.to_string()),
            Err(_) => return restored,
            Ok(_) => None,
        };
        let older = bench.run.store.before(step);
        // The largest of both: whether one is damaged, and the step that all have one of.
        let mut ballot = [f64::from(u8::from(damage.is_some())), -older.map_or(NONE, |step| step.0 as f64)];
        bench.members.comm.all_reduce(BufMut::F64(&mut ballot), Reduce::Max)?;
        let (damaged, older) = (ballot[0] > 0.0, -ballot[1]);
        if !damaged && bench.members.rank().0 == 0 {
            lost.iter().for_each(|step| bench.run.store.set_aside(*step, DAMAGED));
        }
        if !damaged || older < 0.0 {
            return restored;
        }
        let newer = step;
        lost.push(newer);
        step = Step(older as u64);
        if let Some(damage) = damage {
            let line = format!(
                "the checkpoint of step {newer} is damaged, so all ranks go back to step {step}: {damage}"
            );
            bench.members.link.report(Report::Note(line))?;
        }
    }
}
