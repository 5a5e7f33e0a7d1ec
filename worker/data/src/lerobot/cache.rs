//! A cache of bounded weight that forgets what was used longest ago.

use std::{
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lru::LruCache;

/// Locks a cache.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while holding a cache leaves at worst a stale entry behind.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Values by key, the least recently used forgotten when their weights exceed a limit.
pub struct Lru<K: Eq + Hash, V> {
    limit: usize,
    weight: usize,
    entries: LruCache<K, (Arc<V>, usize)>,
}

impl<K: Eq + Hash, V> Lru<K, V> {
    /// An empty cache of this limit.
    pub fn new(limit: usize) -> Self {
        Self { limit, weight: 0, entries: LruCache::unbounded() }
    }

    /// The value of `key`, now the most recently used.
    pub fn get(&mut self, key: &K) -> Option<Arc<V>> {
        Some(self.entries.get(key)?.0.clone())
    }

    /// Keeps a value, and forgets others if it must; a value heavier than the limit is not kept.
    pub fn put(&mut self, key: K, value: Arc<V>, weight: usize) {
        self.weight += weight;
        let mut forgotten = self.entries.put(key, (value, weight));
        loop {
            self.weight -= forgotten.map_or(0, |(_, weight)| weight);
            if self.weight <= self.limit {
                break;
            }
            forgotten = self.entries.pop_lru().map(|(_, entry)| entry);
        }
    }

    /// Weight of all values.
    pub fn weight(&self) -> usize {
        self.weight
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
        assert!(cache.get(&4).is_none() && cache.weight == 0 && cache.entries.is_empty());
    }
}
