//! Chats as a run sees them: which of them train, and each as ids and patches.
//!
//! [`Chats::from_spec`] reads every chat and looks for every image, so that what people can mend is said
//! before anything starts. What only shows when a chat is encoded (an image that does not decode, a token
//! beyond the vocabulary) is a fault of the chat: it is left out, and the run continues.

use std::{path::Path, sync::Arc};

use coxswain_data::{DataError, Fingerprint, TrainingSamples, surviving::surviving};
use coxswain_models::{
    Shelf,
    vision_language::{EncodedChat, Message, Piece},
};
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_proto::{ids::Step, order::DamagedRow, run_spec::RunSpec};
use coxswain_task::{Batch, Sample, Samples};

use super::{
    batch::{ChatBatch, ChatSample},
    opening::open_checked,
    outline::HEADER,
    reader::ChatReader,
    source::ChatSource,
    spelling::Chat,
};
use crate::{holdout::Holdout, settings::checked, sft::config::SftSettings, tokens::outline::looked_at};

/// What helps chats that are too long.
const TOO_LONG: &str = "raise data.max_tokens, or lower data.max_pixels";
/// Tokens around a turn, around an image, and of a system turn that the template adds: more than there are.
const TURN_TOKENS: usize = 16;
const IMAGE_TOKENS: usize = 4;
const SYSTEM_TOKENS: usize = 256;
/// Chats that are encoded when they are opened, of those that may lose their end: a fraction of a second.
const LOOKED_AT: usize = 256;

/// Opened chats. Shared between threads.
pub struct Chats {
    source: Box<dyn ChatSource>,
    fingerprint: Fingerprint,
    reader: ChatReader,
    max_tokens: usize,
    holdout: Holdout,
    /// Chats that are left out: the whole of their first answer lies beyond `max_tokens`.
    too_long: Vec<u64>,
    /// How many others lose their end, and whether all that may were looked at.
    cut: (u64, bool),
    /// Chats with an answer that is learned and says nothing.
    silent: Vec<u64>,
    /// What is wrong with the first chat that has an unusable image, and how many others have one.
    unusable: (Option<DataError>, u64),
}

impl Chats {
    /// Opens the run's chats, and what samples are made with.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, DataError> {
        let settings = checked(SftSettings::from_spec(spec))?;
        let path = Path::new(&spec.data.path);
        let reader = ChatReader::from_settings(&settings, models)?;
        let (max_tokens, image_tokens) = (settings.data.max_tokens, reader.image_tokens());
        let (mut long, mut ends, mut silent) = (Vec::new(), Vec::new(), Vec::new());
        let mut see = |index, chat: &Chat| {
            if reach(chat, image_tokens) > max_tokens {
                long.push(index);
            }
            if most_tokens(&chat.messages, image_tokens) > max_tokens {
                ends.push(index);
            }
            if chat.messages.iter().any(says_nothing) {
                silent.push(index);
            }
        };
        let (source, fingerprint) = open_checked(path, &settings.data, &mut see)?;
        let (count, every) = (source.len(), settings.data.holdout_every);
        let holdout = Holdout::new(path, "chat", source.remedy(), count, every)?;
        let (too_long, cut, unusable) = (Vec::new(), (0, true), (None, 0));
        let mut chats =
            Self { source, fingerprint, reader, max_tokens, holdout, too_long, cut, silent, unusable };
        long.retain(|index| !chats.fits(*index));
        ends.retain(|index| long.binary_search(index).is_err());
        chats.cut = chats.count_cut(&ends);
        chats.holdout = chats.holdout.without(&long);
        if chats.training().is_empty() {
            let found = format!(
                "none of the training chats ({count} chats in all) has an answer within data.max_tokens \
                 ({max_tokens})"
            );
            return Err(DataError::invalid(path, "(samples)", found, TOO_LONG));
        }
        chats.too_long = long;
        chats.unusable = chats.count_unusable();
        Ok(chats)
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

    /// A chat that is too long, without its end: it ends before the turn whose image does not fit, or in the
    /// middle of a text. Refused if nothing is left of it to learn.
    fn cut(&self, mut sample: ChatSample) -> Result<ChatSample, String> {
        let (len, most) = (sample.input_ids.len(), self.max_tokens);
        let Some(end) = self.end_of(&sample.input_ids, &sample.learned) else {
            return Err(format!(
                "has no answer within its first {most} of {len} tokens; raise data.max_tokens or remove the chat"
            ));
        };
        if end < len {
            self.reader.keep_images(&mut sample, end);
            sample.input_ids.truncate(end);
            sample.learned.truncate(end);
            sample.cut = len - end;
        }
        Ok(sample)
    }

    /// How many of a chat's tokens are kept; none where nothing of them is learned.
    fn end_of(&self, ids: &[u32], learned: &[bool]) -> Option<usize> {
        let encoder = self.reader.encoder();
        let is_image = |id: &u32| *id == encoder.image_token();
        let most = self.max_tokens.min(ids.len());
        let beyond = ids[most..].iter().position(is_image).map(|at| most + at);
        let end = match beyond {
            // Its first token may well lie within what is kept.
            Some(image) => {
                let begin = ids[..image].iter().rposition(|id| !is_image(id)).map_or(0, |before| before + 1);
                ids[..begin].iter().rposition(|id| *id == encoder.begin()).unwrap_or(0).min(most)
            }
            None => most,
        };
        // The first token is predicted from nothing.
        learned[..end].iter().skip(1).any(|learned| *learned).then_some(end)
    }

    /// Whether the first answer that is learned lies within `data.max_tokens`, or it cannot be known: of a
    /// chat that may be too long its texts are encoded and its images' sizes read.
    fn fits(&self, index: u64) -> bool {
        let outline = self.outline(index);
        outline.is_none_or(|EncodedChat { ids, learned }| self.end_of(&ids, &learned).is_some())
    }

    /// How many of these chats lose their end, and whether each was looked at; of many it is an estimate.
    fn count_cut(&self, chats: &[u64]) -> (u64, bool) {
        let looked_at = chats.len().min(LOOKED_AT);
        let is_cut = |index: &u64| self.outline(*index).is_some_and(|chat| chat.ids.len() > self.max_tokens);
        let some = (0..looked_at).map(|number| &chats[number * chats.len() / looked_at]);
        let cut = some.filter(|index| is_cut(index)).count();
        ((cut * chats.len()).div_ceil(looked_at.max(1)) as u64, looked_at == chats.len())
    }

    /// What is wrong with the first chat whose image cannot be used, and how many others have one, of the
    /// chats that are looked at: a read of each image would take as long as an epoch's decoding.
    fn count_unusable(&self) -> (Option<DataError>, u64) {
        let fault = |index: u64| {
            let head = |image: &str| self.source.image(index, image, HEADER);
            let chat = self.source.chat(index).ok()?;
            self.reader.image_shapes(&chat, &head).err()?;
            // It says what is wrong; and the size of an image may stand behind its beginning.
            self.sample(index).err()
        };
        let others = looked_at(self.len()).filter(|index| self.too_long.binary_search(index).is_err());
        let mut faults = others.filter_map(fault);
        (faults.next(), faults.count() as u64)
    }

    fn outline(&self, index: u64) -> Option<EncodedChat> {
        let head = |image: &str| self.source.image(index, image, HEADER);
        let outline = self.reader.outline(&self.source.chat(index).ok()?, &head);
        outline.ok().map(|(chat, _)| chat)
    }

    /// A chat that is not alone in what it is warned of.
    fn others(&self, like_it: &[u64]) -> String {
        match like_it.len() {
            1 => String::new(),
            all => format!(", like {} more of {} chats", all - 1, self.len()),
        }
    }
}

/// At most so many tokens come before a chat's first answer that is learned, and the first of its own.
fn reach(chat: &Chat, image_tokens: usize) -> usize {
    let first = chat.messages.iter().position(|message| message.learned).unwrap_or(chat.messages.len());
    TURN_TOKENS + most_tokens(&chat.messages[..first], image_tokens)
}

/// At most so many tokens have the first turns of a chat: a token has one byte at least.
fn most_tokens(messages: &[Message], image_tokens: usize) -> usize {
    let pieces = messages.iter().flat_map(|message| &message.pieces).map(|piece| match piece {
        Piece::Text(text) => text.len(),
        Piece::Image => image_tokens + IMAGE_TOKENS,
    });
    SYSTEM_TOKENS + TURN_TOKENS * messages.len() + pieces.sum::<usize>()
}

/// Whether of a turn that is learned there is nothing but its end.
fn says_nothing(message: &Message) -> bool {
    let is_nothing = |piece: &Piece| matches!(piece, Piece::Text(text) if text.trim().is_empty());
    message.learned && message.pieces.iter().all(is_nothing)
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
        let ChatSample { index, input_ids, cut, .. } = sample.content();
        if *cut == 0 {
            return Vec::new();
        }
        let whole = input_ids.len() + cut;
        // Of a text of megabytes not all is encoded.
        let what =
            format!("{whole} tokens or more, {cut} too many: the end is cut off; raise data.max_tokens");
        vec![("cut", self.source.fault(*index, what))]
    }

    fn collate(&self, step: Step, samples: &[&dyn Sample]) -> Box<dyn Batch> {
        let samples: Vec<&ChatSample> = samples.iter().map(|sample| sample.content()).collect();
        Box::new(ChatBatch::from_samples(step, &samples))
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
            format!(
                "{} chats{}, {}{}",
                self.len(),
                self.source.describe(),
                self.holdout.describe(),
                match self.too_long.len() {
                    0 => String::new(),
                    lost => format!(", {lost} left out (no answer within data.max_tokens)"),
                }
            ),
        )];
        if let Some(first) = self.training().get(0) {
            let ChatSample { input_ids, learned, image_shapes, .. } = self.sample(first)?;
            let learned = learned.iter().filter(|learned| **learned).count();
            let (tokens, images) = (input_ids.len(), image_shapes.len());
            let first = format!("the first has {tokens} tokens ({learned} learned), images: {images}");
            told.push(("first_chat", first));
        }
        Ok(told)
    }

    fn warnings(&self) -> Vec<String> {
        let (most, all) = (self.max_tokens, self.len());
        let left_out = self.too_long.first().map(|first| {
            let others = self.others(&self.too_long);
            let what = format!("has no answer within data.max_tokens ({most}){others}: left out; {TOO_LONG}");
            self.source.fault(*first, what).to_string()
        });
        let cut = (self.cut.0 > 0).then(|| {
            let ((cut, is_exact), about) = (self.cut, if self.cut.1 { "" } else { "about " });
            let (are, lose) = if cut == 1 && is_exact { ("is", "loses its") } else { ("are", "lose their") };
            format!("{about}{cut} of {all} chats {are} longer than data.max_tokens = {most} and {lose} end; {TOO_LONG}")
        });
        let silent = self.silent.first().map(|first| {
            let others = self.others(&self.silent);
            let remedy = "write the answer, or switch its turn off with `\"loss\": false`";
            let what = format!(
                "has an empty assistant answer{others}: the model would learn to say nothing; {remedy}"
            );
            self.source.fault(*first, what).to_string()
        });
        let unusable = self.unusable.0.as_ref().map(|first| {
            let (looked_at, others) = (looked_at(all).len(), self.unusable.1);
            format!("{first}; {} of {looked_at} checked chats are left out for the same reason", others + 1)
        });
        let warnings = self.source.warnings().into_iter().chain(left_out).chain(unusable);
        warnings.chain(cut).chain(silent).collect()
    }
}
