//! A journal that is written only as long as its coordinator has the role.
//!
//! A coordinator on a machine that was cut off, or stood still, may wake up after a launcher elsewhere has
//! started another one. Nothing that it says from then on may count.

use coxswain_proto::ids::Step;

use super::{Journal, JournalError, JournalReader};
use crate::core::action::Record;

/// A journal behind a claim to the coordinator's role.
pub struct Fence<J> {
    journal: J,
    number: u64,
    is_lost: Box<dyn Fn() -> bool + Send>,
}

impl<J> Fence<J> {
    /// A journal behind the claim of this number, which asks whether another coordinator has the role by now.
    pub fn new(journal: J, number: u64, is_lost: impl Fn() -> bool + Send + 'static) -> Self {
        Self { journal, number, is_lost: Box::new(is_lost) }
    }

    fn check(&self) -> Result<(), JournalError> {
        match (self.is_lost)() {
            true => Err(JournalError::Superseded { number: self.number }),
            false => Ok(()),
        }
    }
}

impl<J: Journal> Journal for Fence<J> {
    /// Refused where the role is lost; asked again afterwards, because nobody may be told what a successor
    /// that has read the journal meanwhile does not know.
    fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        self.check()?;
        self.journal.append(records)?;
        self.check()
    }

    fn reader(&self) -> Box<dyn JournalReader> {
        self.journal.reader()
    }

    fn copy_for(&self, checkpoint: Step) -> Result<(), JournalError> {
        self.journal.copy_for(checkpoint)
    }

    fn close(&mut self) {
        self.journal.close();
    }
}

#[cfg(test)]
mod tests {
    use coxswain_identity::claims::Claims;

    use super::*;
    use crate::journal::Forgetful;

    #[test]
    fn a_coordinator_that_has_lost_the_role_records_nothing_more() {
        let dir = tempfile::tempdir().unwrap();
        let claims = Claims::of_run(dir.path());
        let claim = claims.take("node0:1", "a").unwrap();
        let asked = claims.clone();
        let mut journal = Fence::new(Forgetful::default(), claim.number, move || asked.is_lost(claim.number));
        journal.append(&[]).unwrap();
        claims.succeed(claim.number, "node1:1", "b").unwrap().unwrap();
        let refused = journal.append(&[]).unwrap_err();
        assert!(matches!(refused, JournalError::Superseded { number: 1 }), "{refused}");
    }
}
