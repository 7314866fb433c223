// Search: pages of kernels hold code alone, so what explains a word comes before what only uses it.
var Scorer = {
  score: ([docname, , , , score, , kind]) =>
    kind === "text" && /^(kernels|exports)\//.test(docname) ? score - 4 : score,
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2, // Sphinx's own
};
