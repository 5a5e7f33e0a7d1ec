//! Answers of a model as it is, or as a run has left it: `cox generate`.
//!
//! A prompt is a question of the user, rendered as training renders chats, up to where the assistant begins.
//! Prompts are answered some at a time, side by side, and each as if it were alone.

use std::{ops::Range, path::Path, sync::Arc};

use coxswain_models::{
    Shelves,
    pretrained::{
        pictures::ImageShape,
        prompts::{Prompts, Rows},
    },
};
use coxswain_nn::{kernels::Tape, params::Trainables};
use coxswain_task::{Fault, GenerateJob, Prompt, Reply, Sampling, TaskError};

use super::{
    config::SftSettings,
    data::{Chat, ChatReader, ChatSample, read_file},
    model::{ChatModel, read_left},
};
use crate::pretrained;

/// Answers to all prompts of a job, in their order.
pub(super) fn generate<B: Tape<Base = B>>(
    job: &GenerateJob<'_>,
    models: Shelves<B>,
    device: &B::Device,
) -> Result<Vec<Reply>, TaskError> {
    let mut settings = SftSettings::from_spec(job.spec).map_err(TaskError::bad_input)?;
    let reader = ChatReader::from_settings(&settings, models.sizes).map_err(TaskError::bad_input)?;
    let question = |(number, prompt): (usize, &Prompt)| {
        asked(&reader, prompt)
            .map_err(|fault| TaskError::bad_input(format!("prompt {}: {fault}", number + 1)))
    };
    let questions = job.prompts.iter().enumerate().map(question).collect::<Result<Vec<_>, _>>()?;
    if let (Some(_), Some(lora)) = (job.results, &mut settings.lora) {
        // What the run began with need not be there any more.
        lora.init_from = None;
    }
    let (model, layout, mut values) = ChatModel::<B>::load(job.spec, &settings, models.device, device)?;
    if let Some(dir) = job.results {
        pretrained::fill(dir, read_left(&settings, models.sizes, dir)?, &layout, &mut values)?;
    }
    let trainables = Trainables::new(layout, values, device);
    let writer = Writer { model: &model, trainables: &trainables, reader: &reader, sampling: job.sampling };
    let mut written = Vec::with_capacity(questions.len());
    for questions in questions.chunks(job.batch.max(1)) {
        written.extend(writer.answer(written.len(), questions)?);
    }
    Ok(written)
}

/// A prompt as the model reads it; paths of images begin where the program was started.
fn asked(reader: &ChatReader, prompt: &Prompt) -> Result<ChatSample, String> {
    let images = prompt.images.iter().map(|path| path.to_string_lossy().into_owned()).collect();
    reader.question(&Chat::question(&prompt.text, images)?, &|image| read_file(Path::new(image)))
}

/// A model that writes.
pub(super) struct Writer<'a, B: Tape<Base = B>> {
    pub model: &'a ChatModel<B>,
    pub trainables: &'a Trainables<B>,
    pub reader: &'a ChatReader,
    pub sampling: Sampling,
}

impl<B: Tape<Base = B>> Writer<'_, B> {
    /// Answers to some questions, of which the first has this number.
    pub fn answer(&self, first: usize, questions: &[ChatSample]) -> Result<Vec<Reply>, TaskError> {
        let encoder = self.reader.encoder();
        let ends = encoder.ends();
        let mut answers: Vec<Answer> = questions.iter().map(|_| Answer::default()).collect();
        let rows = Questions::from_samples(questions, encoder.pad());
        let begun = self.model.decoder(self.trainables, rows.prompts()).map_err(TaskError::bad_input);
        let (mut decoder, mut logits_bv) = begun?;
        for token in 0.. {
            let [_, vocab] = logits_bv.dims();
            let logits = logits_bv.into_data().convert::<f32>().into_vec::<f32>().expect("converted to f32");
            for (row, (answer, logits)) in answers.iter_mut().zip(logits.chunks_exact(vocab)).enumerate() {
                if answer.ended {
                    continue;
                }
                let number = first + row;
                let id = self.sampling.next(logits, number as u64, token);
                let id = id.ok_or_else(|| not_finite(number))?;
                answer.ids.push(id);
                answer.ended = ends.contains(&id);
            }
            if token + 1 >= self.sampling.max_new_tokens as u64 || answers.iter().all(|answer| answer.ended) {
                break;
            }
            // A row that has ended goes on unheard.
            let next: Vec<u32> = answers.iter().filter_map(|answer| answer.ids.last().copied()).collect();
            logits_bv = decoder.follow(&next).map_err(TaskError::io)?;
        }
        answers.into_iter().map(|Answer { ids, ended }| self.written(ids, ended)).collect()
    }

    fn written(&self, ids: Vec<u32>, ended: bool) -> Result<Reply, TaskError> {
        let text = self.reader.encoder().decode(&ids).map_err(TaskError::bad_input)?;
        Ok(Reply { ids, text, ended })
    }
}

fn not_finite(number: usize) -> TaskError {
    let number = number + 1;
    let problem = format!("prompt {number}: the model's logits are not finite; its weights are unusable");
    TaskError::new(Fault::Numeric, problem)
}

#[derive(Default)]
struct Answer {
    ids: Vec<u32>,
    ended: bool,
}

/// Questions side by side, padded on the left: all of them go on at the same column.
struct Questions {
    input_ids: Vec<u32>,
    valid: Vec<Range<u32>>,
    image_shapes: Vec<ImageShape>,
    pixel_values: Vec<Arc<Vec<f32>>>,
}

impl Questions {
    fn from_samples(questions: &[ChatSample], pad: u32) -> Self {
        let seq = questions.iter().map(|question| question.input_ids.len()).max().unwrap_or(0);
        let padding = |question: &ChatSample| seq - question.input_ids.len();
        let row = |question| std::iter::repeat_n(pad, padding(question)).chain(question.input_ids.clone());
        Self {
            input_ids: questions.iter().flat_map(row).collect(),
            valid: questions.iter().map(|question| padding(question) as u32..seq as u32).collect(),
            image_shapes: questions.iter().flat_map(|question| question.image_shapes.clone()).collect(),
            pixel_values: questions.iter().map(|question| question.pixel_values.clone()).collect(),
        }
    }

    fn prompts(&self) -> Prompts<'_> {
        let Self { input_ids, valid, image_shapes, pixel_values } = self;
        Prompts { input_ids, rows: Rows::Padded(valid), images: image_shapes, pixel_values }
    }
}
