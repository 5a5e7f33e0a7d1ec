//! What ranks prove to each other before either believes a word: that they share a token.
//!
//! ```text
//! key    = BLAKE3-derive-key("… a ring", token)
//! proof  = BLAKE3-keyed(key, role | opening | challenge | answer)
//! ```
//!
//! The opening has the caller's nonce and what it says of itself (run, generation, ranks), the challenge is
//! the other side's nonce: a proof is of no use on another connection, in another place, or in the other
//! direction. Without a token, as in a program's own tests, the key is a constant and proves nothing.

use coxswain_identity::{IdentityError, Scope, Token, Tokens, random};

/// Bytes of a nonce.
pub(super) const NONCE: usize = 32;
/// Bytes of a proof.
pub(super) const PROOF: usize = 32;
/// Bytes of a key's public name.
pub(super) const NAME: usize = 8;

/// A nonce that was never used before.
pub(super) fn nonce() -> Result<[u8; NONCE], IdentityError> {
    random()
}

/// Who proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Caller = 1,
    Called = 2,
}

/// What a token is to a ring.
#[derive(Clone)]
pub(super) struct RingKey {
    /// Says which token, and nothing about it.
    pub name: [u8; NAME],
    key: [u8; 32],
}

impl RingKey {
    fn from_token(token: &Token) -> Self {
        Self { name: token.name(), key: token.key("coxswain 2026-11-23 the key of a ring") }
    }

    /// The key to call with.
    pub(super) fn to_call(tokens: Option<&Tokens>) -> Self {
        let token = tokens.and_then(|tokens| tokens.for_scope(Scope::Worker));
        token.map_or(Self { name: [0; NAME], key: [0; 32] }, |token| Self::from_token(&token))
    }

    /// The key that a caller has named, if we share it.
    pub(super) fn named(name: [u8; NAME], tokens: Option<&Tokens>) -> Option<Self> {
        match tokens {
            Some(tokens) => tokens.named(name, Scope::Worker).map(|token| Self::from_token(&token)),
            None => Some(Self::to_call(None)).filter(|key| key.name == name),
        }
    }

    /// A proof that `role` has this key, in the conversation that began with `opening` and `challenge`.
    pub(super) fn prove(&self, role: Role, heard: &Transcript<'_>) -> [u8; PROOF] {
        let mut mac = blake3::Hasher::new_keyed(&self.key);
        mac.update(&[role as u8]).update(heard.opening).update(heard.challenge).update(heard.answer);
        *mac.finalize().as_bytes()
    }

    /// Whether `proof` is one. Takes as long for one that is nearly right.
    pub(super) fn proves(&self, role: Role, heard: &Transcript<'_>, proof: [u8; PROOF]) -> bool {
        blake3::Hash::from(self.prove(role, heard)) == blake3::Hash::from(proof)
    }
}

/// What both sides have heard; each part has one length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transcript<'a> {
    pub opening: &'a [u8],
    pub challenge: &'a [u8; NONCE],
    /// Empty in the caller's proof, which comes before it.
    pub answer: &'a [u8],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_one_key_one_role_and_one_conversation() {
        let token = Token::fresh(Scope::Worker).expect("randomness");
        let (key, other) = (
            RingKey::from_token(&token),
            RingKey::from_token(&Token::fresh(Scope::All).expect("randomness")),
        );
        let challenge = nonce().expect("randomness");
        let heard = Transcript { opening: b"opening", challenge: &challenge, answer: b"" };
        let proof = key.prove(Role::Caller, &heard);
        assert!(key.proves(Role::Caller, &heard, proof));
        assert!(!key.proves(Role::Called, &heard, proof), "it cannot be sent back");
        assert!(!other.proves(Role::Caller, &heard, proof));
        let again = nonce().expect("randomness");
        for replayed in [
            Transcript { challenge: &again, ..heard },
            Transcript { opening: b"0pening", ..heard },
            Transcript { answer: b"welcome", ..heard },
        ] {
            assert!(!key.proves(Role::Caller, &replayed, proof), "{replayed:?}");
        }
    }

    #[test]
    fn tokens_without_the_scope_of_workers_open_no_ring() {
        let tokens = |scope| Tokens::one(Token::fresh(scope).expect("randomness"));
        for (scope, opens) in
            [(Scope::Read, false), (Scope::Control, false), (Scope::Worker, true), (Scope::All, true)]
        {
            let tokens = tokens(scope);
            let name = RingKey::to_call(Some(&tokens)).name;
            assert_eq!(RingKey::named(name, Some(&tokens)).is_some(), opens, "{scope}");
        }
        let without = RingKey::to_call(None).name;
        assert!(RingKey::named(without, None).is_some());
        assert!(RingKey::named(without, Some(&tokens(Scope::All))).is_none());
    }
}
