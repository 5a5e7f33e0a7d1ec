//! Answers of a model as it is, or as a run has left it: `cox generate`.
//!
//! A prompt is a source without its prefix. Prompts are answered some at a time, side by side, and each as if
//! it were alone.

use coxswain_models::{Shelves, pretrained::directory, text_to_text::TextTokenizer};
use coxswain_nn::{kernels::Tape, params::Trainables};
use coxswain_proto::ids::Step;
use coxswain_task::{Fault, GenerateJob, Prompt, Reply, TaskError};

use super::{
    config::{PairData, Seq2SeqSettings},
    data::{PairBatch, PairSample},
    model::{PairModel, read_left},
};
use crate::pretrained;

/// Answers to all prompts of a job, in their order.
pub(super) fn generate<B: Tape<Base = B>>(
    job: &GenerateJob<'_>,
    models: Shelves<B>,
    device: &B::Device,
) -> Result<Vec<Reply>, TaskError> {
    let mut settings = Seq2SeqSettings::from_spec(job.spec).map_err(TaskError::bad_input)?;
    let dir = &directory::outline(&settings.model.path).map_err(TaskError::bad_input)?;
    let family = models.sizes.text_to_text.of(dir).map_err(TaskError::bad_input)?;
    let special = family.outline(dir).map_err(TaskError::bad_input)?.special;
    let tokenizer = family.tokenizer(dir).map_err(TaskError::bad_input)?;
    let numbered = job.prompts.iter().zip(0..);
    let sources = numbered.map(|(prompt, number)| asked(&*tokenizer, &settings.data, prompt, number));
    let sources = sources.collect::<Result<Vec<_>, _>>()?;
    if let (Some(_), Some(lora)) = (job.results, &mut settings.lora) {
        // What the run began with need not be there any more.
        lora.init_from = None;
    }
    let (model, layout, mut values) = PairModel::<B>::load(job.spec, &settings, models.device, device)?;
    if let Some(dir) = job.results {
        pretrained::fill(dir, read_left(&settings, models.sizes, dir)?, &layout, &mut values)?;
    }
    let trainables = Trainables::new(layout, values, device);
    let mut written = Vec::with_capacity(sources.len());
    for group in sources.chunks(job.batch.max(1)) {
        let fills = [special.pad, special.decoder_start];
        let batch = PairBatch::from_samples(Step(0), &group.iter().collect::<Vec<_>>(), fills);
        let answers =
            model.write(&trainables, &batch, job.sampling.max_new_tokens, &mut |row, at, logits| {
                job.sampling.next(logits, batch.indices[row], at as u64)
            });
        let answers = answers.map_err(|error| {
            let number = batch.indices[error.row] + 1;
            TaskError::new(Fault::Numeric, format!("prompt {number}: {error}"))
        })?;
        for ids in answers {
            let ended = ids.last() == Some(&special.eos);
            let text = tokenizer.text(&ids).map_err(TaskError::bad_input)?;
            written.push(Reply { ids, text, ended });
        }
    }
    Ok(written)
}

/// A prompt as the encoder reads it.
fn asked(
    tokenizer: &dyn TextTokenizer,
    data: &PairData,
    prompt: &Prompt,
    index: u64,
) -> Result<PairSample, TaskError> {
    let refused = |fault: String| TaskError::bad_input(format!("prompt {}: {fault}", index + 1));
    if !prompt.images.is_empty() {
        return Err(refused("has images, but this model reads text alone; leave them out".into()));
    }
    let source = format!("{}{}", data.source_prefix, prompt.text);
    let source = tokenizer.ids(&source, data.max_source_tokens).map_err(refused)?;
    Ok(PairSample { index, source, target: Vec::new() })
}
