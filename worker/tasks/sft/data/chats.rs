//! Chats as a run sees them: which of them train, and each as ids and patches.
//!
//! [`Chats::open`] reads every chat and looks for every image, so that what people can mend is said before
//! anything starts. What only shows when a chat is encoded (an image that does not decode, a token beyond the
//! vocabulary) is the chat's own fault: the run goes on without it.

use std::{path::Path, sync::Arc};

use coxswain_data::{DataError, Fingerprint, TrainingSamples, surviving::surviving};
use coxswain_models::Shelf;
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_proto::{ids::Step, order::DamagedRow, run_spec::RunSpec};
use coxswain_task::{Batch, Sample, Samples};

use super::{
    batch::{ChatBatch, ChatSample},
    opening::open_checked,
    reader::ChatReader,
    source::ChatSource,
    spelling::Chat,
};
use crate::{holdout::Holdout, settings::checked, sft::config::SftSettings};

/// Opened chats. Shared between threads.
pub struct Chats {
    source: Box<dyn ChatSource>,
    fingerprint: Fingerprint,
    reader: ChatReader,
    max_tokens: usize,
    holdout: Holdout,
}

impl Chats {
    /// Opens the run's chats, and what samples are made with.
    pub fn open(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, DataError> {
        let settings = checked(SftSettings::of(spec))?;
        let path = Path::new(&spec.data.path);
        let (source, fingerprint) = open_checked(path, &settings.data)?;
        let (count, every) = (source.len(), settings.data.holdout_every);
        let holdout = Holdout::of(path, "chat", source.remedy(), count, every)?;
        let reader = ChatReader::open(&settings, models)?;
        Ok(Self { source, fingerprint, reader, max_tokens: settings.data.max_tokens, holdout })
    }

    /// Chats, held-out ones included.
    pub fn len(&self) -> u64 {
        self.source.len()
    }

    /// Never true: opening refuses an empty file.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Chat `index`, as training sees it.
    pub fn sample(&self, index: u64) -> Result<ChatSample, DataError> {
        let refuse = |fault| self.source.fault(index, fault);
        surviving(|| self.encoded(index, &self.source.chat(index)?).map_err(refuse), refuse)
    }

    /// Chat `index` as it is written.
    pub fn chat(&self, index: u64) -> Result<Chat, DataError> {
        self.source.chat(index)
    }

    /// The file of an image of chat `index`; or what is wrong with it.
    pub fn image(&self, index: u64, name: &str) -> Result<Vec<u8>, String> {
        self.source.image(index, name, u64::MAX)
    }

    /// The beginning of chat `index`, up to where the assistant answers.
    pub fn question(&self, index: u64, beginning: &Chat) -> Result<ChatSample, DataError> {
        let question = self.reader.question(beginning, &|image| self.image(index, image));
        question.map_err(|fault| self.source.fault(index, fault))
    }

    /// What encodes chats.
    pub fn reader(&self) -> &ChatReader {
        &self.reader
    }

    fn encoded(&self, index: u64, chat: &Chat) -> Result<ChatSample, String> {
        self.cut(self.reader.chat(index, chat, &|image| self.image(index, image))?)
    }

    /// A chat that is too long, without its end; refused if an image or the whole answer would go with it.
    fn cut(&self, mut sample: ChatSample) -> Result<ChatSample, String> {
        let (len, most) = (sample.input_ids.len(), self.max_tokens);
        if len > most {
            let image = self.reader.encoder().image_token();
            if sample.input_ids[most..].contains(&image) {
                return Err(format!(
                    "has {len} tokens, and an image lies beyond data.max_tokens ({most}); raise it, or lower data.max_pixels"
                ));
            }
            sample.input_ids.truncate(most);
            sample.learned.truncate(most);
        }
        // The first token is predicted from nothing.
        match sample.learned.iter().skip(1).any(|learned| *learned) {
            true => Ok(sample),
            false => Err(format!(
                "has no answer within its first {most} tokens (it has {len}); raise data.max_tokens or remove the chat"
            )),
        }
    }
}

impl Samples for Chats {
    fn training(&self) -> &Arc<TrainingSamples> {
        self.holdout.training()
    }

    fn holdout(&self) -> Vec<u64> {
        self.holdout.held_out()
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    fn read(&self, index: u64) -> Result<Box<dyn Sample>, DataError> {
        Ok(Box::new(self.sample(index)?))
    }

    fn doubts(&self, sample: &dyn Sample) -> Vec<(&'static str, DataError)> {
        let sample: &ChatSample = sample.content();
        // Whether it was cut shows only where it has as many tokens as a chat may have.
        let whole = || {
            let chat = self.source.chat(sample.index).ok()?;
            let image = |name: &str| self.source.image(sample.index, name, u64::MAX);
            Some(self.reader.chat(sample.index, &chat, &image).ok()?.input_ids.len())
        };
        let len = sample.input_ids.len();
        let whole = if len == self.max_tokens { whole() } else { None };
        let cut = whole.filter(|whole| *whole > len).map(|whole| {
            let what = format!("{whole} tokens, of which {} are cut off; raise data.max_tokens", whole - len);
            ("cut", self.source.fault(sample.index, what))
        });
        cut.into_iter().collect()
    }

    fn collate(&self, step: Step, samples: &[&dyn Sample]) -> Box<dyn Batch> {
        let samples: Vec<&ChatSample> = samples.iter().map(|sample| sample.content()).collect();
        Box::new(ChatBatch::of(step, &samples))
    }

    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn Sample>> {
        let chats = batch.content::<ChatBatch>().apart();
        chats.into_iter().map(|chat| Box::new(chat) as Box<dyn Sample>).collect()
    }

    fn damaged_row(&self, index: u64, _fault: &DataError) -> DamagedRow {
        self.holdout.damaged(index)
    }

    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError> {
        let mut told = vec![(
            "chats",
            format!("{} chats{}, {}", self.len(), self.source.describe(), self.holdout.describe()),
        )];
        if let Some(first) = self.training().get(0) {
            let ChatSample { input_ids, learned, image_shapes, .. } = self.sample(first)?;
            let learned = learned.iter().filter(|learned| **learned).count();
            let (tokens, images) = (input_ids.len(), image_shapes.len());
            told.push(("first_chat", format!("{tokens} tokens, {learned} of them learned, {images} images")));
        }
        Ok(told)
    }

    fn warnings(&self) -> Vec<String> {
        self.source.warnings()
    }
}
