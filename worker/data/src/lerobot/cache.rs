//! A cache of bounded weight that forgets what was used longest ago.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Locks a cache.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while holding a cache leaves at worst a stale entry behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Values by key, the least recently used forgotten when their weights exceed a limit.
pub struct Lru<K, V> {
    limit: usize,
    weight: usize,
    clock: u64,
    entries: HashMap<K, (Arc<V>, usize, u64)>,
    by_age: BTreeMap<u64, K>,
}

impl<K: Copy + Eq + std::hash::Hash, V> Lru<K, V> {
    /// An empty cache of this limit.
    pub fn new(limit: usize) -> Self {
        Self { limit, weight: 0, clock: 0, entries: HashMap::new(), by_age: BTreeMap::new() }
    }

    /// The value of `key`, now the most recently used.
    pub fn get(&mut self, key: &K) -> Option<Arc<V>> {
        let (value, _, age) = self.entries.get_mut(key)?;
        self.by_age.remove(age);
        self.clock += 1;
        *age = self.clock;
        self.by_age.insert(self.clock, *key);
        Some(value.clone())
    }

    /// Keeps a value, and forgets others if it must; a value heavier than the limit is not kept.
    pub fn put(&mut self, key: K, value: Arc<V>, weight: usize) {
        self.remove(&key);
        self.clock += 1;
        self.weight += weight;
        self.entries.insert(key, (value, weight, self.clock));
        self.by_age.insert(self.clock, key);
        while self.weight > self.limit {
            let Some((_, oldest)) = self.by_age.first_key_value() else { break };
            let oldest = *oldest;
            self.remove(&oldest);
        }
    }

    /// Weight of all values.
    pub fn weight(&self) -> usize {
        self.weight
    }

    fn remove(&mut self, key: &K) {
        if let Some((_, weight, age)) = self.entries.remove(key) {
            self.weight -= weight;
            self.by_age.remove(&age);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_forgets_what_was_used_longest_ago_and_never_exceeds_its_limit() {
        let mut cache = Lru::new(10);
        for key in 0..3 {
            cache.put(key, Arc::new(key), 3);
        }
        assert!(cache.get(&0).is_some());
        cache.put(3, Arc::new(3), 4);
        assert!(cache.get(&1).is_none() && cache.get(&0).is_some() && cache.get(&3).is_some());
        cache.put(4, Arc::new(4), 11);
        assert!(cache.weight <= 10 && cache.by_age.len() == cache.entries.len());
    }
}
