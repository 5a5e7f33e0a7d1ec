//! What else than training fits a memory: samples of an evaluation at once, prompts answered side by side.

use coxswain_task::memory::Use;
use coxswain_worker::memory::prediction::{
    Ask,
    fit::{Fit, FitVerdict},
};
use serde::Serialize;

use super::{Question, capacity::Memory};

/// The most that is looked for: no pass here is better for being larger.
const MOST: u64 = 1024;
/// What `cox generate` answers side by side unless it is told.
pub const ANSWERS: u32 = 8;

/// One use of a run's model in one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct UseEstimate {
    /// What for.
    #[serde(rename = "use")]
    pub using: Use,
    /// As many at once as the run file, or the command, says.
    pub batch: u64,
    /// What that means here.
    pub verdict: FitVerdict,
    /// What fits.
    pub fit: Fit,
}

impl Question {
    /// What fits of evaluation and of answers; nothing of what the task does not predict.
    pub fn uses(&self, memory: &Memory) -> Vec<UseEstimate> {
        let eval = self.subject.spec().eval.batch.unwrap_or(self.subject.spec().train.micro_batch) as u64;
        let uses = [(Use::Evaluation, self.world, eval), (Use::Answers, 1, u64::from(ANSWERS))];
        let used = |(using, world, batch)| {
            let peak = |at_once| {
                let ask = Ask { micro_batch: at_once, world, rank: 0, place: self.place(memory) };
                self.subject.predict_use(using, ask).map(|prediction| prediction.peak())
            };
            let now = peak(batch)?;
            let fit = Fit::find(memory.capacity(), MOST, |at_once| peak(at_once).unwrap_or(u64::MAX));
            Some(UseEstimate { using, batch, verdict: FitVerdict::judge(now, memory.capacity()), fit })
        };
        uses.into_iter().filter_map(used).collect()
    }
}
