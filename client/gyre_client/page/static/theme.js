// Before the first paint: the colours that the reader chose, or those of the system.
const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset.theme = chosen;
