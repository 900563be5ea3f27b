/* The search for a message that a reader pastes. It has values that no page has, and Sphinx finds pages with all words
   only. Of a query of six words or more, the words count that are on one page: the one with most of them, and with rare
   ones. Pages that list messages come first. */
var splitQuery = (query) => {
  const words = query.match(/[\p{Letter}\p{Number}_]+/gu) ?? [];
  const isMessage = words.length >= 6;
  Scorer.score = ([page, , , , score]) => score + (isMessage && ["api/errors", "models"].includes(page) ? 100 : 0);
  if (!isMessage) return words;

  const stemmer = new Stemmer();
  const pages = (word) => [Search._index.terms[stemmer.stemWord(word.toLowerCase())] ?? []].flat();
  const counts = new Map();
  for (const word of new Set(words))
    for (const page of pages(word)) counts.set(page, (counts.get(page) ?? 0) + 1 + 1 / pages(word).length);
  const [best] = [...counts].reduce((a, b) => (b[1] > a[1] ? b : a), [null, 0]);
  return words.filter((word) => word.length > 2 && pages(word).includes(best));
};

/* A page that the search leads to opens where most of the words are that Sphinx marks. */
const openAtWords = () => {
  const places = new Map();
  for (const mark of document.querySelectorAll("article .highlighted")) {
    const place = mark.closest("li, tr") ?? mark.closest("p, pre, section");
    places.set(place, (places.get(place) ?? new Set()).add(mark.textContent.toLowerCase()));
  }
  const [best] = [...places].reduce((a, b) => (b[1].size > a[1].size ? b : a), [null, new Set()]);
  best?.scrollIntoView({ block: "center", behavior: "instant" });
};
if (!location.hash) window.addEventListener("load", () => setTimeout(openAtWords, 100)); // Sphinx marks after 10 ms
